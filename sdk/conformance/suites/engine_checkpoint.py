"""Checkpoints go on as if nothing had been between, and what cannot be written or read hurts nothing."""

from __future__ import annotations

import resource
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from core.loss import LossFn
from core.manifest import Capability
from sdk.conformance.base import Subject, absent, offered
from sdk.conformance.closeness import assert_moved_alike
from sdk.conformance.suites.engine_base import (
    BATCHES,
    EngineSuite,
    Tensors,
    answer_to,
    differing,
    engine_of,
    same_for_every_model_type,
    step,
    weights,
)
from sdk.reference import OPTIMIZER, movement_error

DECAYING = attrs.evolve(OPTIMIZER, schedule="linear", total_steps=5)


@attrs.frozen
class Run:
    """Weights at the checkpoint and at the end, the rates of the steps after it, and a random number drawn after it."""

    step: int
    saved: Tensors
    end: Tensors
    rates: list[float]
    random_number: float


def save_and_go_on(rank: int, world_size: int, subject: Subject, model: str, loss: LossFn, path: str) -> Run:
    with engine_of(subject, model, DECAYING) as engine:
        for batch in BATCHES[:2]:
            step(engine, batch, loss)
        engine.save_checkpoint(path, step=2)
        saved, random_number = weights(engine), torch.rand(1).item()
        rates = [step(engine, batch, loss)[2] for batch in BATCHES[2:]]
        engine.settle_checkpoint()
        assert Path(path).exists()
        return Run(2, saved, weights(engine), rates, random_number)


def load_and_go_on(rank: int, world_size: int, subject: Subject, model: str, loss: LossFn, path: str) -> Run:
    with engine_of(subject, model, DECAYING) as engine:
        step(engine, BATCHES[3], loss)  # state of another run, to be replaced
        at = engine.load_checkpoint(path)
        saved, random_number = weights(engine), torch.rand(1).item()
        rates = [step(engine, batch, loss)[2] for batch in BATCHES[2:]]
        return Run(at, saved, weights(engine), rates, random_number)


def at_the_start(
    rank: int, world_size: int, subject: Subject, model: str, loss: LossFn, path: str
) -> tuple[int, list[Tensors]]:
    """A checkpoint before the first step: the weights after a step on from it, without it, with it, in a new engine."""
    ends = []
    with engine_of(subject, model, DECAYING) as engine:
        engine.save_checkpoint(path, step=0)
        for _ in range(2):
            step(engine, BATCHES[0], loss)
            ends.append(weights(engine))
            at = engine.load_checkpoint(path)
    with engine_of(subject, model, DECAYING) as fresh:
        fresh.load_checkpoint(path)
        step(fresh, BATCHES[0], loss)
        return at, [*ends, weights(fresh)]


def load_only(rank: int, world_size: int, subject: Subject, model: str, path: str) -> str:
    with engine_of(subject, model, DECAYING) as engine:
        return answer_to(lambda: engine.load_checkpoint(path))


def save_with_full_disk(
    rank: int, world_size: int, subject: Subject, model: str, loss: LossFn, path: str, full_rank: int
) -> dict[str, Any]:
    """A checkpoint that one rank has no room for, over an older one; then what is left and what still works."""
    with engine_of(subject, model) as engine:
        start = weights(engine)
        engine.save_checkpoint(path, step=1)
        step(engine, BATCHES[0], loss)
        answer = answer_to(lambda: with_room(1000 if rank == full_rank else None, engine, path))
        names = sorted(entry.name for entry in Path(path).parent.iterdir())
        trained = weights(engine)
        result: dict[str, Any] = {
            "answer": answer,
            "left": names,
            "older": answer_to(lambda: engine.load_checkpoint(path)),
        }
        result["changed"] = differing(weights(engine), start)
        step(engine, BATCHES[0], loss)
        result["error"] = movement_error(weights(engine), trained, start)
        engine.save_checkpoint(path, step=3)
        return result | {"newer": engine.load_checkpoint(path)}


def with_room(size: int | None, engine: Any, path: str) -> None:
    """save_checkpoint where no file of this process may become larger."""
    old_signal = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if size is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        engine.save_checkpoint(path, step=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old_signal)


def load_spoilt(
    rank: int, world_size: int, subject: Subject, model: str, loss: LossFn, other: str, directory: str
) -> tuple[dict[str, str], list[str], Tensors]:
    """Answers to bad paths; weights that those changed; the weights after two more steps."""
    import torch.distributed as dist

    at = Path(directory)
    with engine_of(subject, other) as engine:
        engine.save_checkpoint(str(at / "of another model"), step=1)
    with engine_of(subject, model) as engine:
        engine.save_checkpoint(str(at / "whole"), step=1)
        if rank == 0:
            cut_a_file(Path(shutil.copytree(at / "whole", at / "a file is cut")))
            lose_a_file(Path(shutil.copytree(at / "whole", at / "a file is lost")))
            (at / "empty").mkdir()
            (at / "a file").write_text("in the way")
        dist.barrier()
        before = weights(engine)
        names = ("of another model", "a file is cut", "a file is lost", "empty", "not there")
        answers = {name: answer_to(partial(engine.load_checkpoint, str(at / name))) for name in names}
        under_a_file = str(at / "a file" / "checkpoint")
        answers["saved below a file"] = answer_to(lambda: engine.save_checkpoint(under_a_file, step=1))
        changed = differing(weights(engine), before)
        for batch in BATCHES[:2]:
            step(engine, batch, loss)
        return answers, changed, weights(engine)


def largest(directory: Path) -> Path:
    return max((file for file in directory.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)


def cut_a_file(directory: Path) -> None:
    file = largest(directory)
    file.write_bytes(file.read_bytes()[:-100])


def lose_a_file(directory: Path) -> None:
    largest(directory).unlink()


def asked_for_checkpoints(rank: int, world_size: int, subject: Subject, model: str, path: str) -> list[str]:
    with engine_of(subject, model) as engine:
        calls: list[Callable[[], Any]] = [
            lambda: engine.save_checkpoint(path, step=1),
            lambda: engine.load_checkpoint(path),
        ]
        return [answer_to(call) for call in calls]


def reference_and_policy(
    rank: int, world_size: int, subject: Subject, model: str, loss: LossFn, directory: str
) -> tuple[int, list[str], str]:
    """An engine that isn't trainable reads the policy's; the policy is asked to read its."""
    with engine_of(subject, model) as policy, engine_of(subject, model, trainable=False) as reference:
        step(policy, BATCHES[0], loss)
        policy.save_checkpoint(f"{directory}/policy", step=1)
        at = reference.load_checkpoint(f"{directory}/policy")
        wrong = differing(weights(reference), weights(policy))
        reference.save_checkpoint(f"{directory}/reference", step=1)
        return at, wrong, answer_to(lambda: policy.load_checkpoint(f"{directory}/reference"))


class CheckpointSuite(EngineSuite):
    def saved(self, world_size: int) -> tuple[str, list[Run]]:
        """A checkpoint after two steps, and the run that went on from it."""

        def make() -> tuple[str, list[Run]]:
            path = str(self.session.directory("checkpoint") / "step-2")
            return path, self.on(world_size, save_and_go_on, self.model_of_suite(), self.loss(), path)

        return self.once(("saved", world_size), make)

    def check(self, runs: list[Run], unbroken: Run) -> None:
        start = self.plain().start
        for run in runs:
            assert run.step == 2
            assert differing(run.saved, unbroken.saved) == []
            assert run.rates == pytest.approx(unbroken.rates), "the schedule goes on"
            assert_moved_alike(run.end, unbroken.end, start, limit=self.bounds.movement)

    @offered(Capability.CHECKPOINT)
    def test_training_goes_on_from_a_checkpoint_as_if_unbroken(self, world_size: int) -> None:
        path, unbroken = self.saved(world_size)
        runs = self.on(world_size, load_and_go_on, self.model_of_suite(), self.loss(), path)
        self.check(runs, unbroken[0])
        assert [run.random_number for run in runs] == [run.random_number for run in unbroken], "random generators go on"

    @offered(Capability.CHECKPOINT)
    @same_for_every_model_type
    def test_a_checkpoint_before_the_first_step_goes_on_too(self, tmp_path: Path) -> None:
        """The optimizer's state is there before the first step, and is that of no step."""
        arguments = (self.model_of_suite(), self.loss(), str(tmp_path / "start"))
        for at, ends in self.on(self.worlds_used()[-1], at_the_start, *arguments):
            assert at == 0
            for end in ends:
                assert_moved_alike(end, ends[0], self.plain().start, limit=1e-5)

    @offered(Capability.CHECKPOINT, Capability.RESHARD)
    @same_for_every_model_type
    def test_training_goes_on_at_another_number_of_ranks(self) -> None:
        first, last = self.worlds_used()[0], self.worlds_used()[-1]
        for saved_at, loaded_at in {(first, last), (last, first)}:
            path, unbroken = self.saved(saved_at)
            runs = self.on(loaded_at, load_and_go_on, self.model_of_suite(), self.loss(), path)
            self.check(runs, unbroken[0])

    @offered(Capability.CHECKPOINT)
    @absent(Capability.RESHARD)
    def test_a_checkpoint_of_another_number_of_ranks_is_refused(self) -> None:
        first, last = self.worlds_used()[0], self.worlds_used()[-1]
        if first != last:
            for answer in self.on(last, load_only, self.model_of_suite(), self.saved(first)[0]):
                assert answer.startswith("refused"), answer

    @offered(Capability.CHECKPOINT)
    @same_for_every_model_type
    @pytest.mark.parametrize("who", ["first", "last"])
    def test_a_full_disk_is_refused_on_all_ranks_and_the_older_checkpoint_stays(self, tmp_path: Path, who: str) -> None:
        world_size = self.worlds_used()[-1]
        full_rank = 0 if who == "first" else world_size - 1
        path = str(tmp_path / "checkpoint")
        ranks = self.on(world_size, save_with_full_disk, self.model_of_suite(), self.loss(), path, full_rank)
        for each in ranks:
            assert each["answer"].startswith("refused"), each["answer"]
            assert path in each["answer"], "the message names the path"
            assert each["left"] == ["checkpoint"]
            assert each["older"] == "taken", "the older checkpoint is whole"
            assert each["changed"] == [], "weights of the older checkpoint"
            assert each["error"] < 1e-5, "the same step again"
            assert each["newer"] == 3
        assert {each["answer"] for each in ranks} == {ranks[0]["answer"]}, "all ranks say the same"

    @offered(Capability.CHECKPOINT)
    @same_for_every_model_type
    def test_what_is_no_checkpoint_of_this_model_is_refused_with_nothing_changed(self, tmp_path: Path) -> None:
        model, other = self.model_of_suite(), self.model_of_suite(intermediate_size=192)
        plain = self.plain()
        ranks = self.on(self.worlds_used()[-1], load_spoilt, model, self.loss(), other, str(tmp_path))
        for answers, changed, end in ranks:
            wrong = {name: answer for name, answer in answers.items() if not answer.startswith("refused")}
            assert wrong == {}, "what was not refused"
            assert answers == ranks[0][0], "all ranks say the same"
            assert changed == []
            assert_moved_alike(end, plain.end, plain.start, limit=self.bounds.movement)

    @offered(Capability.CHECKPOINT)
    @same_for_every_model_type
    def test_a_reference_loads_the_policys_checkpoint_but_not_the_other_way_round(self, tmp_path: Path) -> None:
        arguments = (self.model_of_suite(), self.loss(), str(tmp_path))
        for at, wrong, answer in self.on(self.worlds_used()[-1], reference_and_policy, *arguments):
            assert (at, wrong) == (1, [])
            assert answer.startswith("refused"), answer

    @absent(Capability.CHECKPOINT)
    def test_checkpoints_are_refused(self, tmp_path: Path) -> None:
        path = str(tmp_path / "checkpoint")
        for answers in self.on(self.worlds_used()[0], asked_for_checkpoints, self.model_of_suite(), path):
            assert all(answer.startswith("refused") for answer in answers), answers
        assert not Path(path).exists()
