"""What SGLang's Engine leaves of the process that builds it. Its module is faked."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from core.manifest import ModelFacts
from manymesh_sglang import local_engine
from manymesh_sglang.config import SglangRolloutConfig
from manymesh_sglang.local_engine import LocalEngine


class Engine:
    """Changes the environment as SGLang's does; has what a LocalEngine takes of it."""

    seen: Mapping[str, str]

    def __init__(self, **options: Any) -> None:
        os.environ.update(NCCL_CUMEM_ENABLE="0", NCCL_NVLS_ENABLE="0", CUDA_DEVICE_MAX_CONNECTIONS="8")
        os.environ.pop("NCCL_ALGO", None)
        Engine.seen = dict(os.environ)
        self.loop = asyncio.new_event_loop()
        watchdog = SimpleNamespace(_processes=[], stop=lambda: None)
        self.tokenizer_manager = SimpleNamespace(
            _subprocess_watchdog=watchdog, auto_create_handle_loop=lambda: None, asyncio_tasks=[]
        )
        self._scheduler_init_result = SimpleNamespace(scheduler_infos=[{"max_total_num_tokens": 100}])
        self.send_to_rpc = None

    def shutdown(self) -> None: ...


def test_the_environment_is_whole_again_after_sglang_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    fake: Any = ModuleType("sglang.srt.entrypoints.engine")
    fake.Engine = Engine
    for name in ("sglang", "sglang.srt", "sglang.srt.entrypoints"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    monkeypatch.setattr(LocalEngine, "generate", lambda self, prompts, parameters: [None])
    monkeypatch.setattr(local_engine, "check_probe", lambda answer, where: None)
    monkeypatch.setattr(local_engine, "arguments", lambda *args, **options: {})
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    before = dict(os.environ)
    engine = LocalEngine(
        SglangRolloutConfig("x"), ModelFacts("x", "llama", {}), torch.device("cpu"), has_tokenizer=False
    )
    assert (Engine.seen["NCCL_NVLS_ENABLE"], Engine.seen["SGLANG_USE_CPU_ENGINE"]) == ("0", "1")
    assert dict(os.environ) == before
    engine.engine.loop.close()
