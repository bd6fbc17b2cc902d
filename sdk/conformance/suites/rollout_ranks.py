"""A rollout over several ranks: together they generate what one does alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch

from core.manifest import Capability
from core.rollout import Rollout, SamplingParams
from sdk.conformance.base import Conformance, Subject, gate
from sdk.conformance.process_state import left_behind, process_state, restore
from sdk.conformance.suites.mesh import MeshSuite
from sdk.conformance.suites.rollout_base import RolloutSuite, Row, Weights, prompts, rows_of, update

PROMPTS = [[1, 5, 6], [7], [40, 41, 42], [9, 9], [12, 13], [30, 31, 32, 33], [50], [8, 7]]


@attrs.frozen
class Generated:
    """What a rank gave with the first weights and with the second, and what of the process's state it left changed."""

    dp_rank: int
    is_collect: bool
    rows: list[list[Row]]
    left: Mapping[str, str]


def generate(
    rank: int, world_size: int, subject: Subject, model: str, second: Weights, sampling: SamplingParams
) -> Generated:
    """Each dp rank has a share of PROMPTS."""
    state = process_state()
    rollout: Rollout = subject.build(model=model)
    rollout.initialize()
    mesh = rollout.mesh
    mine = range(len(PROMPTS) * mesh.dp_rank // mesh.dp_size, len(PROMPTS) * (mesh.dp_rank + 1) // mesh.dp_size)
    batch = prompts(*(PROMPTS[i] for i in mine), prompt_id=mine)
    rows = [rows_of(rollout.generate(batch, sampling))]
    update(rollout, second, 1)
    rows.append(rows_of(rollout.generate(batch, sampling)))
    rollout.shutdown()
    leftovers = left_behind(state, process_state())
    restore(state)
    return Generated(mesh.dp_rank, mesh.is_collect, rows, leftovers)


def serves(suite: type[Conformance]) -> str:
    if Capability.SERVER in suite.capabilities():
        return "the ranks of a server are replicas, each with an engine that knows of no other"
    return ""


class RankSuite(RolloutSuite, MeshSuite):
    def model_of_suite(self) -> str:
        return self.models.directory(1)

    def sampling_of_ranks(self) -> SamplingParams:
        temperature = 0.8 if self.offers(Capability.ROW_SEEDS) else 0.0
        return self.sampling(num_samples=2, max_new_tokens=8, temperature=temperature, **self.seed(1))

    def ranks(self, world_size: int) -> list[Generated]:
        """What `generate` gives on every rank, run once."""
        arguments = self.models.directory(1), self.models.weights(2), self.sampling_of_ranks()
        return self.once(("ranks", world_size), lambda: self.on(world_size, generate, *arguments))

    def test_process_wide_state_is_left_as_it_was(self, live: Rollout) -> None:
        """Of a server in this process, beside the one of the other tests: a rank of the kit's may start no process."""
        if serves(type(self)):
            arguments = self.models.directory(1), self.models.weights(2), self.sampling_of_ranks()
            ranks = [generate(0, 1, self.subject(), *arguments)]
        else:
            ranks = self.ranks(self.worlds_used()[0])
        for rank in ranks:
            assert rank.left == {}, "state of the process that a rollout left behind"

    @gate(serves)
    def test_ranks_generate_what_one_does_before_and_after_an_update(self, world_size: int, live: Rollout) -> None:
        sampling, second, ranks = self.sampling_of_ranks(), self.models.weights(2), self.ranks(world_size)
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
