"""Engines whose model is held by two processes together, against one that one process holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from core.errors import Refused
from core.rollout import SamplingParams
from manymesh_sglang.config import SglangRolloutConfig, SglangServerConfig
from manymesh_sglang.local_rollout import SglangRollout
from manymesh_sglang.server_engine import SglangServerEngine
from manymesh_sglang.server_rollout import SglangServerRollout
from sdk.conformance.suites.rollout_base import Models, prompts, update

pytestmark = pytest.mark.timeout(900)  # processes that load SGLang start slowly on a busy machine

OPTIONS: dict[str, Any] = {"max_num_seqs": 32, "kv_cache_tokens": 4096, "update_timeout_s": 60.0}
SAMPLING = SamplingParams(temperature=0.7, max_new_tokens=12, seed=3, num_samples=2)


def before_and_after_an_update(rollout: Any, models: Models) -> list[TensorDict]:
    update(rollout, models.weights(1), 0)
    rows = [rollout.generate(prompts([5, 6, 7], [9], [40, 41]), SAMPLING)]
    update(rollout, models.weights(2), 1)
    return [*rows, rollout.generate(prompts([5, 6, 7], [9], [40, 41]), SAMPLING)]


def check_equal(rows: list[TensorDict], wanted: list[TensorDict]) -> None:
    for each, want in zip(rows, wanted, strict=True):
        assert each["input_ids"].values().tolist() == want["input_ids"].values().tolist()
        difference = each["rollout_log_probs"].values() - want["rollout_log_probs"].values()
        assert float(difference.abs().max()) < 1e-5


@pytest.fixture(scope="module")
def of_one_process(models: Models) -> list[TensorDict]:
    rollout = SglangRollout(SglangRolloutConfig(models.directory(1), **OPTIONS), device="cpu")
    rollout.initialize()
    rows = before_and_after_an_update(rollout, models)
    rollout.shutdown()
    assert not torch.equal(rows[0]["input_ids"].values(), rows[1]["input_ids"].values())
    return rows


@pytest.fixture(scope="module")
def server(models: Models) -> Iterator[SglangServerRollout]:
    config = SglangServerConfig(models.directory(1), tensor_parallel=2, weights="tensor", **OPTIONS)
    rollout = SglangServerRollout(config, device="cpu")
    rollout.initialize()
    yield rollout
    rollout.shutdown()


def test_an_engine_of_two_processes_samples_what_one_does_before_and_after_an_update(
    models: Models, of_one_process: list[TensorDict]
) -> None:
    config = SglangRolloutConfig(models.directory(1), tensor_parallel=2, **OPTIONS)
    rollout = SglangRollout(config, device="cpu")
    rollout.initialize()
    try:
        check_equal(before_and_after_an_update(rollout, models), of_one_process)
    finally:
        rollout.shutdown()


@pytest.mark.parametrize("weights", ["tensor", "distributed", "disk"])
def test_a_server_of_two_processes_samples_what_one_does_by_each_upload(
    server: SglangServerRollout, models: Models, of_one_process: list[TensorDict], weights: str, tmp_path: Any
) -> None:
    if weights == "tensor":
        check_equal(before_and_after_an_update(server, models), of_one_process)
        return
    options = {"weights_dir": str(tmp_path)} if weights == "disk" else {}
    rollout = _over(server, models, tensor_parallel=2, weights=weights, **options)
    rollout.initialize()
    check_equal(before_and_after_an_update(rollout, models), of_one_process)
    rollout.shutdown()


def test_a_running_server_that_is_cut_otherwise_is_refused(server: SglangServerRollout, models: Models) -> None:
    with pytest.raises(Refused, match=r"its tp_size 2, tensor_parallel 1[\s\S]*set tensor_parallel to 2"):
        _over(server, models).initialize()


def _over(server: SglangServerRollout, models: Models, **options: Any) -> SglangServerRollout:
    """A rollout over the same server, which it takes for somebody else's."""
    engine = server._engine
    assert isinstance(engine, SglangServerEngine)
    client = engine._client
    config = SglangServerConfig(
        models.directory(1), addresses=(client.address,), api_key=client.key, **(OPTIONS | options)
    )
    return SglangServerRollout(config, device="cpu")
