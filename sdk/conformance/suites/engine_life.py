"""An engine's life: before it is initialized, its modes, what it refuses and how that leaves it, and its end."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from core.batch import to_jagged
from core.config import OptimizerConfig
from core.engine import OPTIONAL, Engine
from core.errors import Refused
from core.loss import LossFn
from core.manifest import Capability
from manymesh.parts.schedule import lr_factor
from sdk.conformance.base import Subject, offered
from sdk.conformance.closeness import assert_moved_alike
from sdk.conformance.process_state import left_behind, process_state, restore
from sdk.conformance.suites.engine_base import (
    BATCHES,
    EngineSuite,
    Tensors,
    answer_to,
    differing,
    engine_of,
    infer,
    micro_batches,
    same_for_every_model_type,
    step,
    weights,
)
from sdk.reference import TEMPERATURE, scale_of

SCHEDULED = OptimizerConfig(lr=1e-2, schedule="cosine", warmup_steps=2, total_steps=6, min_lr_ratio=0.1)


def open_and_close(rank: int, world_size: int, subject: Subject, model: str, loss: LossFn) -> dict[str, Any]:
    """Twice an engine's whole life; what of it is left afterwards."""
    import torch.distributed as dist

    def around() -> dict[str, Any]:
        groups = dict(dist.distributed_c10d._world.pg_names)
        return {"process groups": len(groups), "child processes": len(child_processes())}

    before, state = around(), process_state()
    engine = subject.build(model=model)
    answers = {"is an Engine": isinstance(engine, Engine), "before initialize": answer_to(engine.optimizer_zero_grad)}
    engine.initialize()
    first, rows = step(engine, BATCHES[0], loss), micro_batches(engine, BATCHES[0])
    engine.shutdown()
    answers["after shutdown"] = answer_to(
        lambda: engine.forward_backward(rows, None, scale_of(BATCHES[0]), forward_only=True)
    )
    answers["zeroed after shutdown"] = answer_to(engine.optimizer_zero_grad)
    after = around()
    engine.initialize()
    again = step(engine, BATCHES[0], loss)
    engine.shutdown()
    leftovers: dict[str, Any] = {name: (before[name], value) for name, value in after.items() if value != before[name]}
    leftovers |= {f"{name} after another": (after[name], v) for name, v in around().items() if v != after[name]}
    left_in_process = left_behind(state, process_state())
    restore(state)
    return {"answers": answers, "left": leftovers, "left in process": left_in_process, "steps": (first, again)}


def child_processes() -> list[int]:
    """Of this process, by /proc; none where the system has no such files."""
    lists = Path("/proc/self/task").glob("*/children")
    return [int(pid) for each in lists for pid in each.read_text().split()]


def answers_to_bad_requests(
    rank: int, world_size: int, subject: Subject, model: str, loss: LossFn, batches: Any
) -> tuple[dict[str, str], Tensors, str]:
    """How each is answered; the weights after a step on each of two batches with the requests before and between; and
    how a step is answered that has no gradient."""
    with engine_of(subject, model) as engine:
        rows = micro_batches(engine, batches[0], 2)
        jagged = [to_jagged(each) for each in rows]
        strange = [each.copy().set("inputs/strange_pixels", torch.zeros(len(each), 3)) for each in rows]
        requests: dict[str, tuple[Any, Any, dict[str, Any]]] = {
            "a loss that needs an output that no engine has": (rows, Needs(loss), {}),
            "an output that no engine has": (rows, None, {"forward_only": True, "outputs": frozenset({"logits"})}),
            "rows that aren't padded": (jagged, loss, {}),
            "a temperature of 0": (rows, loss, {"temperature": 0.0}),
            "model inputs that it doesn't read": (strange, loss, {}),
            "training without a loss": (rows, None, {}),
        }
        if engine.mesh.layout.size("pp") == 1:  # in a pipeline only the last stage runs the loss, and others wait
            requests["a loss that refuses the second micro-batch"] = (rows, RefusesSecond(loss), {})
            requests["a loss without gradient"] = (rows, Detached(loss), {})
        answers = {}
        for batch in batches:
            for name, (parts, loss_fn, options) in requests.items():
                with engine.train_mode():
                    answers[name] = answer_to(
                        partial(engine.forward_backward, parts, loss_fn, scale_of(batch), **options)
                    )
            if engine.mesh.layout.size("pp") > 1:  # else the last request failed in a pass, which drops gradients
                engine.optimizer_zero_grad()
            without = answer_to(engine.optimizer_step)
            step(engine, batch, loss, 2)
        return answers, weights(engine), without


@attrs.frozen
class Needs:
    inner: Any
    needs: frozenset[str] = frozenset({"no such output"})

    def __call__(self, outputs: Any, batch: Any, scale: Any) -> Any:
        return self.inner(outputs, batch, scale)


class Wrapped:
    def __init__(self, inner: Any) -> None:
        self.inner, self.needs, self.calls = inner, inner.needs, 0


class RefusesSecond(Wrapped):
    """When the first has already left a gradient."""

    def __call__(self, outputs: Any, batch: Any, scale: Any) -> Any:
        self.calls += 1
        if self.calls % 2 == 0:
            raise Refused("the batch lacks a column")
        return self.inner(outputs, batch, scale)


class Detached(Wrapped):
    def __call__(self, outputs: Any, batch: Any, scale: Any) -> Any:
        loss, metrics = self.inner(outputs, batch, scale)
        return loss.detach(), metrics


def steps_around_a_bad_one(
    rank: int, world_size: int, subject: Subject, model: str, batches: Any, loss: LossFn
) -> dict[str, Any]:
    with engine_of(subject, model) as engine:
        step(engine, batches[0], loss)
        before = weights(engine)
        bad = batches[0].clone()
        bad["advantages"][0] = float("inf")  # one rank's rows
        _, norm, _, skipped = step(engine, bad, loss)
        changes = differing(weights(engine), before)
        *_, then = step(engine, batches[1], loss)
        return {"norm": norm, "skipped": skipped, "changed": changes, "then skipped": then, "end": weights(engine)}


def eval_between(
    rank: int, world_size: int, subject: Subject, model: str, loss: LossFn, outputs: frozenset[str]
) -> Tensors:
    """A step with an evaluation between backward and step; another with gradients that were dropped before it."""
    with engine_of(subject, model) as engine, engine.train_mode():
        for number, batch in enumerate(BATCHES[:2]):
            engine.optimizer_zero_grad()
            if number:  # gradients that must not count
                engine.forward_backward(
                    micro_batches(engine, BATCHES[3]), loss, scale_of(BATCHES[3]), temperature=TEMPERATURE
                )
                engine.optimizer_zero_grad()
            engine.forward_backward(micro_batches(engine, batch), loss, scale_of(batch), temperature=TEMPERATURE)
            infer(engine, BATCHES[2], outputs)
            if engine.mesh.layout.size("pp") == 1:  # an evaluation that fails, on all ranks
                parts = micro_batches(engine, BATCHES[2], 2)
                failing = partial(engine.forward_backward, parts, RefusesSecond(loss), scale_of(BATCHES[2]))
                assert answer_to(partial(failing, forward_only=True)) == "refused: the batch lacks a column"
            engine.optimizer_step()
            engine.lr_scheduler_step()
        return weights(engine)


def outputs_in_modes(
    rank: int, world_size: int, subject: Subject, model: str, outputs: frozenset[str], loss: LossFn
) -> str | tuple[list[Tensors | None], bool]:
    """Of a model with much dropout: after a step, twice in eval_mode; and whether training gave outputs."""
    try:
        with engine_of(subject, model, OptimizerConfig(lr=0.0, weight_decay=0.0)) as engine:
            with engine.train_mode():
                parts = micro_batches(engine, BATCHES[0])
                results = engine.forward_backward(parts, loss, scale_of(BATCHES[0]), outputs=outputs)
            has_outputs = any(each.outputs is not None for each in results or ())
            return [infer(engine, BATCHES[0], outputs) for _ in range(2)], has_outputs
    except Refused as error:
        return str(error)


def inference_only(
    rank: int, world_size: int, subject: Subject, model: str, outputs: frozenset[str], loss: LossFn
) -> tuple[dict[str, str], bool]:
    with engine_of(subject, model, trainable=False) as engine:
        values = infer(engine, BATCHES[0], outputs)
        rows = micro_batches(engine, BATCHES[0])
        calls: dict[str, Callable[[], Any]] = {
            "train_mode": lambda: engine.train_mode().__enter__(),
            "optimizer_zero_grad": engine.optimizer_zero_grad,
            "optimizer_step": engine.optimizer_step,
            "lr_scheduler_step": engine.lr_scheduler_step,
            "forward_backward": lambda: engine.forward_backward(rows, loss, scale_of(BATCHES[0])),
        }
        return {name: answer_to(call) for name, call in calls.items()}, values is None or values.keys() == outputs


def rates_of(rank: int, world_size: int, subject: Subject, model: str) -> list[float]:
    with engine_of(subject, model, SCHEDULED) as engine:
        return [engine.lr_scheduler_step() for _ in range(6)]


def moved(
    rank: int, world_size: int, subject: Subject, model: str, loss: LossFn, outputs: frozenset[str], configured: bool
) -> tuple[list[str], Tensors, Tensors | None]:
    """Two steps, with everything on CPU between phases: what changed on the way, the end, and outputs after it."""
    options: dict[str, Any] = {"offload_parameters": True, "offload_optimizer": True} if configured else {}
    with engine_of(subject, model, **options) as engine:
        changes = []
        for batch in BATCHES[:2]:
            before = weights(engine)
            if not configured:
                engine.to("cpu", model=True, optimizer=True, grad=True)
            changes += differing(weights(engine), before)
            if not configured:
                engine.to("device", model=True, optimizer=True, grad=True)
            with engine.eval_mode():  # a mode within a mode doesn't send away what the outer one needs
                infer(engine, batch, outputs)
                infer(engine, batch, outputs)
            step(engine, batch, loss, 2)
        return changes, weights(engine), infer(engine, BATCHES[0], outputs)


def protocols_of(rank: int, world_size: int, subject: Subject, model: str) -> set[Capability]:
    with engine_of(subject, model) as engine:
        return {capability for capability, protocol in OPTIONAL.items() if isinstance(engine, protocol)}


def refused_to_read(rank: int, world_size: int, subject: Subject, model: str) -> str:
    def life() -> None:
        with engine_of(subject, model):
            pass

    return answer_to(life)


def spoilt(source: str, directory: Path, how: str) -> str:
    if how == "is missing":
        return str(directory / "nowhere")
    target = Path(shutil.copytree(source, directory / "spoilt"))
    file = target / "model.safetensors"
    if how == "has no weights":
        file.unlink()
    elif how == "has weights that are cut":
        file.write_bytes(file.read_bytes()[:-5000])
    else:
        config = json.loads((target / "config.json").read_text())
        (target / "config.json").write_text(json.dumps(config | {"intermediate_size": 256}))
    return str(target)


class LifeSuite(EngineSuite):
    @same_for_every_model_type
    def test_an_engine_is_there_between_initialize_and_shutdown(self, world_size: int) -> None:
        for each in self.lives(world_size):
            assert each["answers"].pop("is an Engine"), "it is no core.engine.Engine"
            for when, answer in each["answers"].items():
                assert answer.startswith("refused"), f"{when}: {answer}"

    @same_for_every_model_type
    def test_nothing_is_left_of_an_engine_that_was_shut_down(self, world_size: int) -> None:
        """No process group and no child process."""
        for each in self.lives(world_size):
            assert each["left"] == {}, "what is left, before and after"

    @same_for_every_model_type
    def test_an_engine_can_be_initialized_again(self, world_size: int) -> None:
        for each in self.lives(world_size):
            first, again = each["steps"]
            assert first == pytest.approx(again, rel=1e-5)

    @same_for_every_model_type
    def test_process_wide_state_is_left_as_it_was(self, world_size: int) -> None:
        for life in self.lives(world_size):
            assert life["left in process"] == {}, "state of the process that an engine left behind"

    def lives(self, world_size: int) -> list[dict[str, Any]]:
        model = self.model_of_suite()
        ranks = self.once(("lives", world_size), lambda: self.on(world_size, open_and_close, model, self.loss()))
        return [each | {"answers": dict(each["answers"])} for each in ranks]

    @same_for_every_model_type
    def test_bad_requests_are_refused_and_leave_the_engine_as_it_was(self, world_size: int) -> None:
        model, plain = self.model_of_suite(), self.plain()
        for answers, end, without in self.on(world_size, answers_to_bad_requests, model, self.loss(), BATCHES[:2]):
            wrong = {name: answer for name, answer in answers.items() if not answer.startswith("refused")}
            assert wrong == {}, "requests that were not refused"
            assert without.startswith("refused"), f"a step without gradients: {without}"
            assert_moved_alike(end, plain.end, plain.start, limit=self.bounds.movement, what="steps after refusals")

    @same_for_every_model_type
    @pytest.mark.parametrize(
        "how", ["is missing", "has no weights", "has weights that are cut", "has weights of another shape"]
    )
    def test_a_model_directory_that_is_not_whole_is_refused_alike_on_all_ranks(self, tmp_path: Path, how: str) -> None:
        at = spoilt(self.model_of_suite(), tmp_path, how)
        answers = self.on(self.worlds_used()[-1], refused_to_read, at)
        assert answers[0].startswith("refused"), answers[0]
        assert at in answers[0], "the message names the directory"
        assert set(answers) == {answers[0]}, "all ranks say the same"

    @same_for_every_model_type
    def test_gradients_that_are_not_finite_change_nothing(self) -> None:
        """One rank's bad row is enough, and all ranks skip."""
        plain = self.plain()
        ranks = self.on(self.worlds_used()[-1], steps_around_a_bad_one, self.model_of_suite(), BATCHES[:2], self.loss())
        for each in ranks:
            assert each["skipped"], "StepInfo.skipped"
            assert not torch.tensor(each["norm"]).isfinite(), "grad_norm says what was wrong"
            assert each["changed"] == [], "weights that changed"
            assert not each["then skipped"]
            assert_moved_alike(each["end"], plain.end, plain.start, limit=self.bounds.movement, what="the next step")

    @same_for_every_model_type
    def test_evaluations_and_dropped_gradients_do_not_count(self, world_size: int) -> None:
        plain, model = self.plain(), self.model_of_suite()
        for end in self.on(world_size, eval_between, model, self.loss(), self.outputs()):
            assert_moved_alike(end, plain.end, plain.start, limit=self.bounds.movement)

    @same_for_every_model_type
    def test_eval_mode_is_without_dropout_and_training_gives_no_outputs(self) -> None:
        """An engine may refuse models with dropout."""
        model = self.model_of_suite(attention_dropout=0.5)
        ranks = self.on(self.worlds_used()[0], outputs_in_modes, model, self.outputs(), self.loss())
        plain = self.plain().outputs  # the same weights
        for each in ranks:
            if isinstance(each, str):
                assert "dropout" in each
                continue
            (first, second), has_outputs = each
            assert not has_outputs, "when training, outputs are dropped micro-batch by micro-batch"
            for name in first or ():
                assert first is not None
                assert second is not None
                assert plain is not None
                assert torch.equal(first[name], second[name])
                self.assert_near(first[name], plain[name], name)

    def test_an_engine_that_is_not_trainable_infers_and_refuses_to_train(self) -> None:
        model = self.model_of_suite()
        for answers, right in self.on(self.worlds_used()[-1], inference_only, model, self.outputs(), self.loss()):
            assert right, "it infers"
            wrong = {name: answer for name, answer in answers.items() if not answer.startswith("refused")}
            assert wrong == {}, "calls that were not refused"

    @same_for_every_model_type
    def test_the_schedule_is_the_one_of_the_options(self) -> None:
        want = [SCHEDULED.lr * lr_factor(SCHEDULED, number) for number in range(6)]
        for rates in self.on(self.worlds_used()[0], rates_of, self.model_of_suite()):
            assert rates == pytest.approx(want)

    @offered(Capability.OFFLOAD)
    @same_for_every_model_type
    @pytest.mark.parametrize("how", ["by to()", "by options"])
    def test_training_with_everything_on_cpu_between_phases_is_the_same(self, world_size: int, how: str) -> None:
        configured = how == "by options"
        if configured and not self.has_option("offload_parameters"):
            return  # options for it are the engine's own business
        plain, model = self.plain(), self.model_of_suite()
        for changes, end, _ in self.on(world_size, moved, model, self.loss(), self.outputs(), configured):
            assert changes == [], "weights exported from CPU"
            assert_moved_alike(end, plain.end, plain.start, limit=self.bounds.movement)

    @same_for_every_model_type
    def test_an_engine_has_the_methods_of_its_capabilities_and_no_others(self) -> None:
        """What the manifest doesn't offer is not written: workers refuse by the protocol."""
        offers = {capability for capability in OPTIONAL if capability in self.manifest().capabilities}
        for have in self.on(self.worlds_used()[0], protocols_of, self.model_of_suite()):
            assert have == offers, "capabilities whose protocol the engine meets, and those that its manifest offers"
