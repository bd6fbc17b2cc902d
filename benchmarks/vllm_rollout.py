"""The vLLM rollout against bare vLLM in the same process: `python -m benchmarks.vllm_rollout`, where vLLM is installed.

| case | ours | floor |
|---|---|---|
| generate-1, -32, -128 | VllmRollout.generate of so many rows, batch in and out | generate of the same LLM |
| update | one whole weight update, in buckets | one copy of all tensors, one by one |

The model is small, so that what the rollout adds shows: it doesn't grow with the model. Both sides ask for the sampled
tokens' log-probabilities, without text. An update makes vLLM's layers anew from the saved tensors and drops the KV
cache, where the floor moves each byte once: its ratio says how many plain copies' time that takes.
"""

from __future__ import annotations

import argparse
import os
import tempfile

from benchmarks._pairs import Case, measure, report

NUM_TOKENS = 48


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the vLLM rollout against bare vLLM.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--pairs", type=int, default=15)
    args = parser.parse_args()
    for name, value in {"OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}.items():
        os.environ.setdefault(name, value)

    import torch
    import vllm
    from safetensors.torch import load_file
    from tensordict import TensorDict

    from core.engine import WeightSpec
    from core.registry import EngineRegistry
    from core.rollout import SamplingParams
    from sdk.testing import tiny_model

    def texts(num_rows: int) -> torch.Tensor:
        return torch.randint(3, 2000, (num_rows, 16))  # new ones each time, or the prefix cache would have them

    cases: list[Case] = []
    with tempfile.TemporaryDirectory() as directory:
        model = tiny_model(
            directory, num_layers=4, vocab_size=2048, hidden_size=256, intermediate_size=768, head_dim=64
        )
        options = {"model": model, "max_model_len": 128, "max_num_batched_tokens": 4096, "kv_cache_mb": 128}
        rollout = EngineRegistry.new(None, "vllm", options, kind="rollout")
        rollout.initialize()
        llm = rollout._engine.llm
        sampling = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True)
        bare = vllm.SamplingParams(
            max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0, flat_logprobs=True, detokenize=False
        )

        def ours(num_rows: int) -> None:
            rollout.generate(TensorDict({"prompt_ids": texts(num_rows)}, batch_size=[num_rows]), sampling)

        def floor(num_rows: int) -> None:
            llm.generate([{"prompt_token_ids": row} for row in texts(num_rows).tolist()], bare, use_tqdm=False)

        for rows in (1, 32, 128):
            cases.append(measure(f"generate-{rows}", lambda n=rows: floor(n), lambda n=rows: ours(n), args.pairs))  # type: ignore[misc]

        weights = load_file(f"{model}/model.safetensors")
        specs = [WeightSpec(name, tuple(tensor.shape), "float32") for name, tensor in weights.items()]
        copies = {name: torch.empty_like(tensor) for name, tensor in weights.items()}

        def update() -> None:
            rollout.begin_weight_update(specs, 1)
            rollout.load_bucket(list(weights.items()))
            rollout.finish_weight_update()

        def copy() -> None:
            for name, tensor in weights.items():
                copies[name].copy_(tensor)

        cases.append(measure("update", copy, update, args.pairs))
    report(cases, args.json)


if __name__ == "__main__":
    main()
