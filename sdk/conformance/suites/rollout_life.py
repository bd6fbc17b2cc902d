"""A rollout's beginning and end: what is refused before it is there and after it was shut down, and what it leaves."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from core.errors import Refused
from core.manifest import Capability
from core.rollout import Rollout
from manymesh.parts.rollout_checks import releasing
from sdk.conformance.base import absent
from sdk.conformance.suites.rollout_base import (
    RolloutHolder,
    RolloutSuite,
    child_processes,
    greedy_error,
    prompts,
    rows_of,
    specs,
    update,
)


class LifeSuite(RolloutSuite):
    def refuses_everything(self, rollout: Rollout) -> bool:
        calls: tuple[Callable[[], object], ...] = (
            lambda: rollout.generate(prompts([5]), self.greedy(2)),
            lambda: rollout.begin_weight_update(specs(self.models.weights(1)), 1),
            lambda: releasing(rollout).resume(["weights"]),
            lambda: releasing(rollout).release(["weights"]),
        )
        for call in calls:
            with pytest.raises(Refused):
                call()
        return rollout.weight_version is None

    def test_nothing_works_before_initialize(self, rollout: Rollout) -> None:
        assert self.refuses_everything(self.build(self.models.directory(1)))
        assert rollout.weight_version == 0  # of the one beside it

    @pytest.mark.parametrize("fault", ["no directory", "no config", "a weight is missing"])
    def test_a_directory_without_a_whole_model_is_refused(self, rollout: Rollout, tmp_path: Path, fault: str) -> None:
        directory = tmp_path / "model"
        if fault == "no config":
            directory.mkdir()
        elif fault == "a weight is missing":
            shutil.copytree(self.models.directory(1), directory)
            weights = load_file(directory / "model.safetensors")
            weights.pop("lm_head.weight")
            save_file(weights, directory / "model.safetensors", {"format": "pt"})
        broken = self.build(str(directory))
        with pytest.raises(Refused, match="lm_head" if fault == "a weight is missing" else str(directory)):
            broken.initialize()
        assert broken.weight_version is None

    def test_without_the_directorys_weights_it_has_none_until_a_whole_update(
        self, fresh: Callable[..., Rollout], tmp_path: Path
    ) -> None:
        directory = tmp_path / "model"
        shutil.copytree(self.models.directory(1), directory, ignore=shutil.ignore_patterns("*.safetensors"))
        rollout = fresh(str(directory), load="none")
        versions = [rollout.weight_version]
        with pytest.raises(Refused):
            rollout.generate(prompts([5]), self.greedy(2))
        update(rollout, self.models.weights(2), 1)
        assert [*versions, rollout.weight_version] == [None, 1]
        [row] = rows_of(rollout.generate(prompts([5, 6, 7]), self.greedy(4)))
        assert greedy_error(self.models.reference(2), row, self.log_prob_kind) < self.bounds.sampled

    def test_after_shutdown_nothing_works_and_no_process_is_left(self, holder: RolloutHolder) -> None:
        rollout = holder.get()
        holder.close()
        assert self.refuses_everything(rollout)
        deadline = time.monotonic() + 30
        while (survivors := holder.processes & child_processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert survivors == frozenset()

    @absent(Capability.SERVER)
    def test_it_takes_no_requests(self, rollout: Rollout) -> None:
        submit = getattr(rollout, "submit", None)
        if submit is not None:
            with pytest.raises(Refused):
                submit([5], self.greedy(2))
