"""A rollout over several ranks: together they generate what one does alone."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from core.manifest import Capability
from core.rollout import Rollout, SamplingParams
from sdk.conformance.base import Conformance, Subject, gate
from sdk.conformance.suites.mesh import MeshSuite
from sdk.conformance.suites.rollout_base import RolloutSuite, Row, Weights, prompts, rows_of, update

PROMPTS = [[1, 5, 6], [7], [40, 41, 42], [9, 9], [12, 13], [30, 31, 32, 33], [50], [8, 7]]


@attrs.frozen
class Generated:
    """What a rank gave with the first weights and with the second."""

    dp_rank: int
    is_collect: bool
    rows: list[list[Row]]


def generate(
    rank: int, world_size: int, subject: Subject, model: str, second: Weights, sampling: SamplingParams
) -> Generated:
    """Each dp rank has a share of PROMPTS."""
    rollout: Rollout = subject.build(model=model)
    rollout.initialize()
    mesh = rollout.mesh
    mine = range(len(PROMPTS) * mesh.dp_rank // mesh.dp_size, len(PROMPTS) * (mesh.dp_rank + 1) // mesh.dp_size)
    batch = prompts(*(PROMPTS[i] for i in mine), prompt_id=mine)
    rows = [rows_of(rollout.generate(batch, sampling))]
    update(rollout, second, 1)
    rows.append(rows_of(rollout.generate(batch, sampling)))
    rollout.shutdown()
    return Generated(mesh.dp_rank, mesh.is_collect, rows)


def serves(suite: type[Conformance]) -> str:
    if Capability.SERVER in suite.capabilities():
        return "the ranks of a server are replicas, each with an engine that knows of no other"
    return ""


class RankSuite(RolloutSuite, MeshSuite):
    def model_of_suite(self) -> str:
        return self.models.directory(1)

    @gate(serves)
    def test_ranks_generate_what_one_does_before_and_after_an_update(self, world_size: int, live: Rollout) -> None:
        sampling = self.sampling(num_samples=2, max_new_tokens=8, temperature=0.8, **self.seed(1))
        if not self.offers(Capability.ROW_SEEDS):
            sampling = attrs.evolve(sampling, temperature=0.0)
        second = self.models.weights(2)
        ranks: list[Generated] = self.on(world_size, generate, self.models.directory(1), second, sampling)
        alone = [rows_of(live.generate(prompts(*PROMPTS), sampling))]
        update(live, second, 1)
        alone.append(rows_of(live.generate(prompts(*PROMPTS), sampling)))
        for stage, want in enumerate(alone):
            collected = sorted((each for each in ranks if each.is_collect), key=lambda each: each.dp_rank)
            assert close([row for each in collected for row in each.rows[stage]], want)
            for each in ranks:  # those of one dp rank give the same
                assert close(each.rows[stage], collected[each.dp_rank].rows[stage])
        assert not close(*alone)


def close(have: Any, want: Any) -> bool:
    return [row.ids for row in have] == [row.ids for row in want] and all(
        torch.allclose(a.all_log_probs, b.all_log_probs, atol=1e-4) for a, b in zip(have, want, strict=True)
    )
