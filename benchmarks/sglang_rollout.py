"""The SGLang rollouts against bare SGLang with the same model and options, in the environment that has SGLang.

Each engine is held by a process of its own, told by a pipe what to do, ours and the floor alike. Floors:

- generate-N: `Engine.generate` of N prompts with log-probabilities, and SGLang's own sampler.
- update: begin_weight_update, update_weights_from_tensor of all tensors, end_weight_update, flush_cache.
- server-N: one POST to /generate of a bare server, by the same HTTP client.
- server-update-KIND: the same requests of HTTP to a bare server, without the plugin: per tensor a broadcast, one load
  of tensors in shared memory, or a checkpoint that is on disk already (ours writes it first).
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import multiprocessing
import os
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from benchmarks._pairs import Case, measure, report

NUM_TOKENS = 48
OPTIONS = {"max_model_len": 128, "max_num_seqs": 64, "kv_cache_tokens": 8192}
KINDS_OF_UPLOAD = ("distributed", "tensor", "disk")


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the SGLang rollouts against bare SGLang.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--only", default="", help="cases whose names begin so")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    from sdk.testing import tiny_model

    cases: list[Case] = []
    with tempfile.TemporaryDirectory() as directory:
        model = tiny_model(
            directory, num_layers=4, vocab_size=2048, hidden_size=256, intermediate_size=768, head_dim=64
        )
        for ours, floor, names in (
            (OurEngine, BareEngine, ["generate-1", "generate-16", "update"]),
            (OurServers, BareServer, ["server-1", "server-16", *(f"server-update-{kind}" for kind in KINDS_OF_UPLOAD)]),
        ):
            chosen_names = [name for name in names if name.startswith(args.only)]
            with ExitStack() as stack:
                hosts = [stack.enter_context(Host(kind, model)) for kind in (floor, ours)] if chosen_names else []
                for name in chosen_names:
                    base, mine = (lambda each=each, name=name: each.run(name) for each in hosts)
                    cases.append(measure(name, base, mine, args.pairs))
    report(cases, args.json)


class Host:
    """A process that holds one of the classes below."""

    def __init__(self, kind: type, model: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, kind, model))
        self._process.start()
        theirs.close()
        self._pipe.recv()

    def run(self, name: str) -> None:
        self._pipe.send(name)
        self._pipe.recv()

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.send("")
        self._process.join()


def _serve(pipe: Any, kind: Callable[[str], Any], model: str) -> None:
    subject = kind(model)
    pipe.send(None)
    while name := pipe.recv():
        subject.run(name)
        pipe.send(None)
    subject.close()


def _texts(name: str) -> list[list[int]]:
    import torch

    number = int(name.rpartition("-")[2])
    texts: list[list[int]] = torch.randint(3, 2000, (number, 16)).tolist()  # new ones, or the prefix cache has them
    return texts


def _weights(model: str) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(f"{model}/model.safetensors")


class _Ours:
    """A rollout of the registry."""

    _model: str
    _rollouts: dict[str, Any]  # by the option `weights`; "" generates

    def _build(self, backend: str, **options: Any) -> Any:
        from core.registry import EngineRegistry

        rollout = EngineRegistry.new(None, backend, {"model": self._model} | OPTIONS | options, "cpu", kind="rollout")
        rollout.initialize()
        return rollout

    def _prepare(self) -> None:
        from core.engine import WeightSpec
        from core.rollout import SamplingParams

        self._tensors = _weights(self._model)
        self._specs = [WeightSpec(name, tuple(each.shape), "float32") for name, each in self._tensors.items()]
        self._asked = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True)

    def run(self, name: str) -> None:
        import torch
        from tensordict import TensorDict

        what, _, kind = name.removeprefix("server-").partition("-")
        if what == "update":
            rollout = self._rollouts[kind]
            rollout.begin_weight_update(self._specs, 1)
            rollout.load_bucket(list(self._tensors.items()))
            rollout.finish_weight_update()
            return
        texts = torch.tensor(_texts(name))
        self._rollouts[""].generate(TensorDict({"prompt_ids": texts}, batch_size=[len(texts)]), self._asked)

    def close(self) -> None:
        for rollout in reversed(self._rollouts.values()):
            rollout.shutdown()


class OurEngine(_Ours):
    def __init__(self, model: str) -> None:
        self._model = model
        self._rollouts = {"": self._build("sglang")}
        self._prepare()


class OurServers(_Ours):
    """One server; for the other kinds of upload, rollouts that take it for somebody else's."""

    def __init__(self, model: str) -> None:
        self._model = model
        own = self._build("sglang_server", weights="tensor")
        client = own._engine._client
        other = {"addresses": [client.address], "api_key": client.key}
        self._rollouts = {"": own, "tensor": own}
        self._rollouts["distributed"] = self._build("sglang_server", weights="distributed", **other)
        self._rollouts["disk"] = self._build(
            "sglang_server", weights="disk", weights_dir=tempfile.gettempdir(), **other
        )
        self._prepare()


def _arguments(model: str) -> dict[str, Any]:
    import torch

    from core.manifest import ModelFacts
    from manymesh_sglang.arguments import arguments
    from manymesh_sglang.config import SglangRolloutConfig

    config = SglangRolloutConfig(model, **OPTIONS)  # type: ignore[arg-type]
    return arguments(config, ModelFacts.read(model), torch.device("cpu"), has_tokenizer=False)


ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
BARE = {"temperature": 1.0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}


class BareEngine:
    def __init__(self, model: str) -> None:
        os.environ.update(ENVIRONMENT)
        import sglang

        self._engine = sglang.Engine(**_arguments(model))
        self._tensors = list(_weights(model).items())

    def run(self, name: str) -> None:
        if name == "update":
            for success, _ in (
                self._engine.begin_weight_update(),
                self._engine.update_weights_from_tensor(self._tensors, flush_cache=False),
                self._engine.end_weight_update(),
            ):
                assert success
            assert self._engine.flush_cache().success
            return
        self._engine.generate(input_ids=_texts(name), sampling_params=BARE, return_logprob=True)

    def close(self) -> None:
        self._engine.shutdown()


class BareServer:
    def __init__(self, model: str) -> None:
        os.environ.pop("MANYMESH_SGLANG_SAMPLER", None)
        from manymesh.parts.event_loop import LoopThread
        from manymesh_sglang.http import HttpClient, ServerError
        from manymesh_sglang.server_process import LOOPBACK, ServerProcess

        self._model, self._tensors = model, list(_weights(model).items())
        self._process = ServerProcess(_arguments(model), ENVIRONMENT, 0)
        self._client = HttpClient(LOOPBACK, self._process.port, self._process.key)
        self._loop = LoopThread("bare")

        async def ready() -> None:
            while True:
                try:
                    await self._client.call("GET", "/health", timeout_s=10)
                    return
                except ServerError:
                    self._process.check()
                    await asyncio.sleep(0.5)

        self._loop.call(ready())
        self._group: Any = None

    def run(self, name: str) -> None:
        what, _, kind = name.removeprefix("server-").partition("-")
        if what == "update":
            getattr(self, f"_by_{kind}")()
            self._ask("/flush_cache", None)
            self._ask("/update_weight_version", {"new_version": "1", "abort_all_requests": False})
            return
        texts = _texts(name)
        self._ask("/generate", {"input_ids": texts, "sampling_params": BARE, "return_logprob": True})

    def _ask(self, path: str, body: Any) -> Any:
        reply = self._loop.call(self._client.call("POST", path, body, timeout_s=600))
        assert not isinstance(reply, dict) or reply.get("success", True), reply
        return reply

    def _by_distributed(self) -> None:
        import torch

        if self._group is None:
            self._meet()
        self._ask("/begin_weight_update", {})

        def send() -> None:
            for _, tensor in self._tensors:
                torch.distributed.broadcast(tensor.contiguous(), src=0, group=self._group)

        sending = threading.Thread(target=send)
        sending.start()
        names = [name for name, _ in self._tensors]
        shapes = [list(tensor.shape) for _, tensor in self._tensors]
        body = {"names": names, "dtypes": ["float32"] * len(names), "shapes": shapes}
        self._ask("/update_weights_from_distributed", body | {"group_name": "bare", "flush_cache": False})
        sending.join()
        self._ask("/end_weight_update", {})

    def _meet(self) -> None:
        from sglang.srt.utils import init_custom_process_group

        from manymesh_sglang.server_process import free_port

        port = free_port(0)

        def ours() -> None:
            self._group = init_custom_process_group(
                backend="gloo", init_method=f"tcp://127.0.0.1:{port}", world_size=2, rank=0, group_name="bare"
            )

        meeting = threading.Thread(target=ours)
        meeting.start()
        place = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
        self._ask("/init_weights_update_group", place | {"group_name": "bare", "backend": "gloo"})
        meeting.join()

    def _by_tensor(self) -> None:
        import torch
        from sglang.srt.utils import MultiprocessingSerializer

        torch.multiprocessing.set_sharing_strategy("file_system")
        self._ask("/begin_weight_update", {})
        data = base64.b64encode(MultiprocessingSerializer.serialize(self._tensors)).decode()
        self._ask("/update_weights_from_tensor", {"serialized_named_tensors": [data], "flush_cache": False})
        self._ask("/end_weight_update", {})

    def _by_disk(self) -> None:
        self._ask("/update_weights_from_disk", {"model_path": self._model, "flush_cache": False})

    def close(self) -> None:
        self._loop.end()
        self._process.end()


if __name__ == "__main__":
    main()
