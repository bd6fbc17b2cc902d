"""Weights cross by the names that save_pretrained writes, to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from core.engine import AdapterEngine, WeightSpec
from core.loss import LossFn
from core.manifest import Capability
from manymesh.parts.weights import together
from sdk.conformance.base import Subject, offered
from sdk.conformance.closeness import assert_close
from sdk.conformance.suites.engine_base import (
    BATCHES,
    EngineSuite,
    answer_to,
    differing,
    engine_of,
    infer,
    same_for_every_model_type,
    step,
    weights,
)


def exported(
    rank: int, world_size: int, subject: Subject, model: str
) -> tuple[list[tuple[str, torch.Tensor]], list[WeightSpec], list[tuple[str, int]]]:
    """To all, the specs, and names and sizes of what is exported to the first."""
    with engine_of(subject, model, trainable=False) as engine:
        stream = [(name, value.cpu()) for name, value in engine.export_weights()]
        first = [(name, value.numel()) for name, value in engine.export_weights(dst="first")]
        return stream, list(engine.weight_specs()), first


def across(
    rank: int, world_size: int, subject: Subject, model: str, loss: LossFn, outputs: frozenset[str]
) -> dict[str, Any]:
    """A trained engine's weights into a fresh one, through one buffer; then a step on the old one's exports."""
    with engine_of(subject, model) as trained, engine_of(subject, model) as fresh:
        start = weights(trained)
        step(trained, BATCHES[0], loss)
        before, new_weights = infer(fresh, BATCHES[0], outputs), weights(trained)

        def one_buffer() -> Iterator[tuple[str, torch.Tensor]]:
            buffer = torch.empty(max(value.numel() for value in new_weights.values()))
            for name, value in new_weights.items():
                yield name, buffer[: value.numel()].view(value.shape).copy_(value)
            buffer.fill_(torch.nan)

        fresh.load_weights(one_buffer())
        result: dict[str, Any] = {
            "arrived": differing(weights(fresh), new_weights),
            "before": before,
            "after": infer(fresh, BATCHES[0], outputs),
            "want": infer(trained, BATCHES[0], outputs),
            "stale": sorted(name for name in start if torch.equal(start[name], new_weights[name])),
        }
        # From the loaded weights training goes on, and what was exported before stays what it was.
        exports = dict(fresh.export_weights())
        copies = {name: value.clone() for name, value in exports.items()}
        _, norm, *_ = step(fresh, BATCHES[1], loss)
        result["theirs"] = differing(exports, copies)
        result["norms"] = (norm, step(trained, BATCHES[1], loss)[1])
        return result


def spoilt_streams(rank: int, world_size: int, subject: Subject, model: str) -> tuple[dict[str, str], list[str]]:
    with engine_of(subject, model) as engine:
        whole = weights(engine)
        name = next(name for name, value in whole.items() if value.ndim == 1)
        items = list(whole.items())
        streams = {
            "an unknown name": [("model.nonsense", torch.ones(1)), *items],
            "a name that is missing": [item for item in items if item[0] != name],
            "another shape": [(n, torch.ones(3) if n == name else value) for n, value in items],
            "a name that comes twice": [items[0], *items],
        }
        answers = {}
        for what, stream in streams.items():
            answers[what] = answer_to(partial(engine.load_weights, iter(stream)))
        engine.load_weights(iter(items))
        return answers, differing(weights(engine), whole)


def adapter_in_use(
    rank: int, world_size: int, subject: Subject, model: str, loss: LossFn, outputs: frozenset[str]
) -> dict[str, Any]:
    """What a step moves, by the adapter's own names and merged; outputs before, after, and without the adapter."""
    with engine_of(subject, model) as engine:
        if not isinstance(engine, AdapterEngine):
            return {"answer": "is no core.engine.AdapterEngine"}
        before, merged, only = infer(engine, BATCHES[0], outputs), weights(engine), dict(engine.export_adapter())
        step(engine, BATCHES[0], loss)
        with engine.adapter_disabled():
            without = infer(engine, BATCHES[0], outputs)
        return {
            "answer": "taken",
            "specs": [spec.name for spec in engine.adapter_specs()],
            "names": list(only),
            "moved": differing(dict(engine.export_adapter()), only),
            "merged moved": differing(weights(engine), merged),
            "outputs": (before, infer(engine, BATCHES[0], outputs), without),
        }


class WeightsSuite(EngineSuite):
    def exports(self, world_size: int, model: str) -> list[Any]:
        return self.once(("exported", world_size, model), lambda: self.on(world_size, exported, model))

    @pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
    def test_what_is_exported_is_what_is_saved(self, world_size: int, tied: bool) -> None:
        if tied and self.is_value():
            return  # a value model has no head to tie
        model = self.model_of_suite(**({"tie_word_embeddings": True} if tied else {}))
        want = load_file(Path(model, "model.safetensors"))
        for stream, specs, _ in self.exports(world_size, model):
            assert differing(dict(stream), want) == []
            assert [name for name, _ in stream] == [spec.name for spec in specs], "the order of weight_specs"
            have = {(spec.name, tuple(spec.shape), spec.dtype) for spec in specs}
            assert have == {(name, tuple(value.shape), "float32") for name, value in want.items()}

    def test_specs_name_what_rollouts_load_in_one_go(self) -> None:
        for _, specs, _ in self.exports(self.worlds_used()[0], self.model_of_suite()):
            assert {spec.name: spec.together for spec in specs} == {spec.name: together(spec.name) for spec in specs}

    def test_only_the_first_rank_is_given_tensors_where_asked(self, world_size: int) -> None:
        for rank, (stream, _, first) in enumerate(self.exports(world_size, self.model_of_suite())):
            assert first == [(name, value.numel() if rank == 0 else 0) for name, value in stream]

    def test_trained_weights_load_into_a_fresh_engine(self, world_size: int) -> None:
        for each in self.crossings(world_size):
            assert each["stale"] == [], "exported as they were before the step"
            assert each["arrived"] == [], "weights that differ from those sent"
            for name in each["want"] or ():
                assert_close(
                    each["after"][name], each["want"][name], atol=self.bounds.atol, rtol=self.bounds.rtol, what=name
                )
                assert (each["after"][name] - each["before"][name]).abs().max() > 1e-4

    def test_training_goes_on_from_loaded_weights(self, world_size: int) -> None:
        for each in self.crossings(world_size):
            have, want = each["norms"]
            assert have == pytest.approx(want, rel=self.bounds.relative)

    def test_exported_tensors_are_the_receivers_own(self, world_size: int) -> None:
        for each in self.crossings(world_size):
            assert each["theirs"] == [], "exported tensors that a later step changed"

    def crossings(self, world_size: int) -> list[dict[str, Any]]:
        arguments = (self.model_of_suite(), self.loss(), self.outputs())
        return self.once(("across", world_size), lambda: self.on(world_size, across, *arguments))

    @same_for_every_model_type
    def test_streams_of_other_weights_are_refused_and_the_engine_stays_usable(self, world_size: int) -> None:
        ranks = self.on(world_size, spoilt_streams, self.model_of_suite())
        for answers, differences in ranks:
            wrong = {name: answer for name, answer in answers.items() if not answer.startswith("refused")}
            assert wrong == {}, "streams that were not refused"
            assert answers == ranks[0][0], "all ranks say the same"
            assert differences == [], "weights that differ after a whole stream"

    @offered(Capability.ADAPTER)
    def test_the_adapter_alone_is_what_training_moves(self) -> None:
        """And without it the model is the one that training began with."""
        arguments = (self.model_of_suite(), self.loss(), self.outputs())
        for each in self.on(self.worlds_used()[-1], adapter_in_use, *arguments):
            assert each["answer"] == "taken"
            assert each["names"] == each["specs"] != [], "the order of adapter_specs"
            assert each["moved"], "training moves the adapter"
            assert each["merged moved"], "and with it the merged weights"
            before, after, without = each["outputs"]
            for name in before or ():
                self.assert_near(without[name], before[name], name)
                assert (after[name] - before[name]).abs().max() > 1e-4
