"""Steps 08, 11 and 12: rollouts beside the FSDP engine in one process, and vLLM's and SGLang's servers."""

from __future__ import annotations

import importlib
import os
import time
from pathlib import Path
from typing import Any

from sdk.gpu.beside import pairs
from sdk.gpu.fsdp import MIXED
from sdk.gpu.step import StepRun
from sdk.gpu.tools import free_memory, model_for_device, need_backend
from sdk.testing import character_tokenizer, tiny_model

SHARE = 0.4  # of a GPU's memory, beside a trainer
ROWS, NEW_TOKENS = 256, 128  # of bare vLLM, as `pairs` samples


def same_process(run: StepRun) -> None:
    """transformers' generate, in fp32 and in bf16."""
    model = _small_model(run)
    single: dict[str, Any] = {"dtype": "float32", "compute_dtype": "float32"}
    with run.part("fp32"):
        pairs(run.named("fp32"), "hf", model, single, {"dtype": "float32"})
    with run.part("bf16"):
        pairs(run.named("bf16"), "hf", model, MIXED, {"dtype": "bfloat16"})


def vllm(run: StepRun) -> None:
    """vLLM in the trainer's process and as a server, and by itself."""
    need_backend("vllm", "rollout")
    model = model_for_device(run) if run.on_cuda else _small_model(run)
    for backend in ("vllm", "vllm_server"):
        with run.part(backend):
            pairs(run.named(backend), backend, model, MIXED, _options(run))
    with run.part("bare vLLM"):
        _bare_vllm(run, model)


def sglang(run: StepRun) -> None:
    """SGLang beside the trainer and as a server; what starting it does to the environment of this process."""
    need_backend("sglang", "rollout")
    model = model_for_device(run) if run.on_cuda else _small_model(run)
    for backend in ("sglang", "sglang_server"):
        before = dict(os.environ)
        with run.part(backend):
            pairs(run.named(backend), backend, model, MIXED, _options(run))
        changed = sorted(name for name in before.keys() | os.environ.keys() if before.get(name) != os.environ.get(name))
        run.check(f"{backend}: the environment is as before", not changed, ", ".join(changed))


def _options(run: StepRun) -> dict[str, Any]:
    """bf16 where kernels of a GPU run it; the CPU's builds are tested in fp32."""
    if run.on_cuda:
        return {"dtype": "bfloat16", "max_model_len": 512, "gpu_memory_utilization": SHARE}
    return {"dtype": "float32", "max_model_len": 256}


def _small_model(run: StepRun) -> str:
    directory = Path(run.folder, "rollout")
    if not directory.exists():
        tiny_model(directory, head_dim=32, initializer_range=0.3, max_position_embeddings=512)
        character_tokenizer(directory)
    return str(directory)


def _bare_vllm(run: StepRun, model: str) -> None:
    """What vLLM samples in a second without manymesh, same model, rows and lengths: to compare with ours."""
    run.need_cuda()
    library = importlib.import_module("vllm")
    llm = library.LLM(model=model, dtype="bfloat16", max_model_len=512, gpu_memory_utilization=SHARE, max_num_seqs=ROWS)
    sampling = library.SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False, logprobs=0)
    prompts = [{"prompt_token_ids": [3 + (7 * row + i) % 61 for i in range(12)]} for row in range(ROWS)]
    llm.generate(prompts, sampling, use_tqdm=False)
    start = time.perf_counter()
    answers = llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - start
    number = sum(len(answer.outputs[0].token_ids) for answer in answers)
    run.figure("bare vLLM, sampling", number / seconds, "tokens/s", f"{ROWS} rows of {NEW_TOKENS}")
    del llm
    free_memory(run)
