"""What vLLM is built with on GPUs, as far as it can be told without one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from core.errors import Refused
from core.manifest import ModelFacts
from manymesh_vllm.config import VllmRolloutConfig
from manymesh_vllm.local_engine import arguments, check_streams

FACTS = ModelFacts("x", "llama", {"max_position_embeddings": 4096})


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, num_visible: int, **options: Any) -> dict[str, Any]:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_visible)
    config = VllmRolloutConfig("x", **options).on("cuda")
    return arguments(config, FACTS, torch.device("cuda", 0), has_tokenizer=False)


@pytest.mark.parametrize(("num_visible", "tp", "disabled"), [(1, 1, False), (1, 2, True), (8, 2, False), (4, 8, True)])
def test_vllms_own_all_reduce_is_left_out_where_a_process_does_not_see_its_peers_gpus(
    monkeypatch: pytest.MonkeyPatch, num_visible: int, tp: int, disabled: bool
) -> None:
    assert on_a_gpu(monkeypatch, num_visible, tensor_parallel=tp)["disable_custom_all_reduce"] is disabled
    chosen = on_a_gpu(monkeypatch, num_visible, tensor_parallel=tp, vllm={"disable_custom_all_reduce": True})
    assert chosen["disable_custom_all_reduce"] is True


def test_why_vllm_numbers_a_groups_gpus_among_those_that_the_process_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms.interface import Platform

    class Nvidia(Platform):
        device_control_env_var = "CUDA_VISIBLE_DEVICES"

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert str(Nvidia.device_id_to_physical_device_id(0)) == "3"
    with pytest.raises(IndexError):
        Nvidia.device_id_to_physical_device_id(1)


def test_prompts_are_cut_on_gpus_and_not_by_a_runner_whose_streams_would_shift(monkeypatch: pytest.MonkeyPatch) -> None:
    assert on_a_gpu(monkeypatch, 1)["enable_chunked_prefill"] is True
    assert on_a_gpu(monkeypatch, 1, cut_prompts=False)["enable_chunked_prefill"] is False

    def vllm_config(cut: bool, second: bool) -> SimpleNamespace:
        scheduler = SimpleNamespace(enable_chunked_prefill=cut)
        return SimpleNamespace(scheduler_config=scheduler, use_v2_model_runner=second)

    for cut, second in ((False, False), (False, True), (True, True)):
        check_streams(vllm_config(cut, second))
    with pytest.raises(Refused, match="set cut_prompts to false"):
        check_streams(vllm_config(True, False))
