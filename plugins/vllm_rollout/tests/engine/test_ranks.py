"""Two ranks: one model cut over both, or one each; the world they stand in was there before and stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tensordict import TensorDict

from core.errors import Refused
from core.protocols import SamplingParams, WeightSpec
from manymesh_vllm.config import VllmRolloutConfig
from manymesh_vllm.rollout import VllmRollout
from sdk.testing import RankPool

pytestmark = pytest.mark.timeout(600)  # each rank imports vLLM: half a minute, or minutes where others work too

PROMPTS = [[1, 5, 6], [7], [40, 41, 42], [9, 9]]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, timeout_s=580) as ranks:
        yield ranks


def config(directory: str, tp: int) -> VllmRolloutConfig:
    return VllmRolloutConfig(
        directory, tensor_parallel=tp, max_model_len=128, max_num_seqs=16, max_num_batched_tokens=256, kv_cache_mb=16
    )


def life(rank: int, world_size: int, tp: int, first: str, second: str) -> dict[str, Any]:
    """All that a rollout does, on this rank: each dp rank has its own half of the prompts."""
    import torch.distributed as dist

    from core.batch import jagged

    rollout = VllmRollout(config(first, tp), device="cpu")
    mesh = rollout.mesh
    rollout.initialize()
    per_rank = len(PROMPTS) // mesh.dp_size
    mine = range(mesh.dp_rank * per_rank, (mesh.dp_rank + 1) * per_rank)
    batch = TensorDict({"prompt_id": torch.tensor(list(mine))}, batch_size=[per_rank])
    batch.set("prompt_ids", jagged([torch.tensor(PROMPTS[i]) for i in mine]))

    def rows(seed: int | None) -> list[tuple[list[int], list[float]]]:
        out = rollout.generate(batch, SamplingParams(num_samples=2, max_new_tokens=8, seed=seed, temperature=0.8))
        columns = (out[name].unbind() for name in ("input_ids", "rollout_log_probs"))
        return [(ids.tolist(), log_probs.tolist()) for ids, log_probs in zip(*columns, strict=True)]

    answer: dict[str, Any] = {"place": (mesh.dp_rank, mesh.dp_size, mesh.is_collect), "first": rows(1)}
    answer["unseeded"] = [rows(None), rows(None)]
    weights = list(load_file(f"{second}/model.safetensors").items())
    rollout.begin_weight_update([WeightSpec(name, tuple(t.shape), "float32") for name, t in weights], 1)
    for i in range(0, len(weights), 4):
        rollout.load_bucket(weights[i : i + 4])
    rollout.finish_weight_update()
    answer["second"] = rows(1)
    rollout.shutdown()
    if world_size > 1:
        total = torch.tensor([rank + 1])
        dist.all_reduce(total)
        answer["world"] = int(total)
    return answer


def close(rows: list[tuple[list[int], list[float]]], want: list[tuple[list[int], list[float]]]) -> bool:
    return [ids for ids, _ in rows] == [ids for ids, _ in want] and all(
        torch.allclose(torch.tensor(a), torch.tensor(b), atol=1e-4) for (_, a), (_, b) in zip(rows, want, strict=True)
    )


@pytest.fixture(scope="module")
def alone(checkpoints: Callable[..., str]) -> dict[str, Any]:
    return life(0, 1, 1, checkpoints(seed=1), checkpoints(seed=2))


def test_two_ranks_that_share_a_model_sample_alike_and_as_one_does(
    pool: RankPool, checkpoints: Callable[..., str], alone: dict[str, Any]
) -> None:
    a, b = pool.run(life, 2, checkpoints(seed=1), checkpoints(seed=2))
    assert (a["place"], b["place"]) == ((0, 1, True), (0, 1, False))
    for stage in ("first", "second"):
        assert close(a[stage], alone[stage])
        assert a[stage] == b[stage]
    assert not close(a["first"], a["second"])
    assert a["unseeded"] == b["unseeded"]
    assert a["unseeded"][0] != a["unseeded"][1]
    assert a["world"] == b["world"] == 3


def test_two_ranks_with_a_model_each_sample_what_one_does(
    pool: RankPool, checkpoints: Callable[..., str], alone: dict[str, Any]
) -> None:
    a, b = pool.run(life, 1, checkpoints(seed=1), checkpoints(seed=2))
    assert (a["place"], b["place"]) == ((0, 2, True), (1, 2, True))
    for stage in ("first", "second"):
        assert close(a[stage] + b[stage], alone[stage])
    assert a["world"] == b["world"] == 3


def refusals(rank: int, world_size: int, whole: str) -> tuple[str, str]:
    """Rank 1 is given a directory that isn't there: both must refuse, and neither may wait for the other."""
    with pytest.raises(Refused) as sizes:
        VllmRollout(config(whole, 3), device="cpu")
    with pytest.raises(Refused) as missing:
        VllmRollout(config(whole if rank == 0 else f"{whole}/nowhere", 2), device="cpu").initialize()
    return str(sizes.value), str(missing.value)


def test_what_one_rank_refuses_all_refuse(pool: RankPool, checkpoints: Callable[..., str]) -> None:
    for sizes, missing in pool.run(refusals, checkpoints(seed=1)):
        assert "one of 1, 2" in sizes
        assert "no model directory" in missing
