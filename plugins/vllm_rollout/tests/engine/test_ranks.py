"""Two ranks that share one model; the world they stand in was there before and stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from core.errors import Refused
from core.rollout import SamplingParams
from manymesh_vllm.config import VllmRolloutConfig
from manymesh_vllm.local_rollout import VllmRollout
from sdk.conformance.suites.rollout_base import Models, Row, Weights, prompts, rows_of, update
from sdk.conformance.suites.rollout_ranks import close

pytestmark = pytest.mark.timeout(600)  # each rank imports vLLM: half a minute, or minutes where others work too

PROMPTS = [[1, 5, 6], [7], [40, 41, 42], [9, 9]]


def config(directory: str, tp: int) -> VllmRolloutConfig:
    return VllmRolloutConfig(
        directory, tensor_parallel=tp, max_model_len=128, max_num_seqs=16, max_num_batched_tokens=256, kv_cache_mb=16
    )


def life(rank: int, world_size: int, directory: str, second: Weights) -> dict[str, Any]:
    """All that a rollout cut over the world does, on this rank."""
    import torch.distributed as dist

    rollout = VllmRollout(config(directory, world_size), device="cpu")
    rollout.initialize()

    def rows(seed: int | None) -> list[Row]:
        sampling = SamplingParams(num_samples=2, max_new_tokens=8, seed=seed, temperature=0.8)
        return rows_of(rollout.generate(prompts(*PROMPTS), sampling))

    mesh = rollout.mesh
    answer: dict[str, Any] = {"place": (mesh.dp_rank, mesh.dp_size, mesh.is_collect), "first": rows(1)}
    answer["unseeded"] = [[row.ids for row in rows(None)] for _ in range(2)]
    update(rollout, second, 1)
    answer["second"] = rows(1)
    rollout.shutdown()
    if world_size > 1:
        total = torch.tensor([rank + 1])
        dist.all_reduce(total)
        answer["world"] = int(total)
    return answer


def test_two_ranks_that_share_a_model_sample_alike_and_as_one_does(conformance_session: Any, models: Models) -> None:
    directory, second = models.directory(1), models.weights(2)
    a, b = conformance_session.worlds(2, life, directory, second)
    alone = life(0, 1, directory, second)
    assert (a["place"], b["place"]) == ((0, 1, True), (0, 1, False))
    for stage in ("first", "second"):
        assert close(a[stage], alone[stage])
        assert [row.ids for row in a[stage]] == [row.ids for row in b[stage]]
        assert all(torch.equal(x.all_log_probs, y.all_log_probs) for x, y in zip(a[stage], b[stage], strict=True))
    assert not close(a["first"], a["second"])
    assert a["unseeded"] == b["unseeded"]
    assert a["unseeded"][0] != a["unseeded"][1]
    assert a["world"] == b["world"] == 3


def refusals(rank: int, world_size: int, whole: str) -> tuple[str, str]:
    """Rank 1 is given a directory that isn't there: both must refuse, and neither may wait for the other."""
    with pytest.raises(Refused) as sizes:
        VllmRollout(config(whole, 3), device="cpu")
    with pytest.raises(Refused) as missing:
        VllmRollout(config(whole if rank == 0 else f"{whole}/nowhere", 2), device="cpu").initialize()
    return str(sizes.value), str(missing.value)


def test_what_one_rank_refuses_all_refuse(conformance_session: Any, models: Models) -> None:
    for sizes, missing in conformance_session.worlds(2, refusals, models.directory(1)):
        assert "one of 1, 2" in sizes
        assert "no model directory" in missing
