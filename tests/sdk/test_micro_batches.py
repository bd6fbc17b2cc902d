"""What no engine can run is refused, with the method named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from core.batch import to_jagged
from core.errors import Refused
from core.manifest import Limits
from manymesh.parts.micro_batches import check_loss, check_padded, check_request
from sdk.reference import PolicyLoss, make_batch, with_teacher

WHERE = "MineEngine.forward_backward"
LIMITS = Limits(outputs=frozenset({"log_probs", "entropy", "values"}))


def test_a_model_makes_what_the_loss_needs_and_without_training_what_is_asked_for_too() -> None:
    def wanted(loss: Any, *outputs: str, forward_only: bool) -> frozenset[str]:
        return check_request(LIMITS, loss, frozenset(outputs), temperature=1.0, forward_only=forward_only, where=WHERE)

    assert wanted(PolicyLoss(), "values", forward_only=False) == {"log_probs", "entropy"}
    assert wanted(PolicyLoss(), "values", forward_only=True) == {"log_probs", "entropy", "values"}
    assert wanted(None, "values", forward_only=True) == {"values"}
    assert wanted(None, forward_only=True) == frozenset()
    with pytest.raises(Refused, match=rf"no outputs \['logits'\](.|\n)*{WHERE}"):
        wanted(PolicyLoss(), "logits", forward_only=False)
    with pytest.raises(Refused, match=rf"needs a loss(.|\n)*{WHERE}"):
        wanted(None, forward_only=False)


def test_a_loss_that_needs_what_the_engine_lacks_is_refused() -> None:
    with pytest.raises(Refused, match=r"no outputs \['entropy'\](.|\n)*log_probs"):
        check_request(
            Limits(outputs=frozenset({"log_probs"})),
            PolicyLoss(),
            frozenset(),
            temperature=1.0,
            forward_only=True,
            where=WHERE,
        )


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (to_jagged, rf"padded(.|\n)*{WHERE}(.|\n)*jagged"),
        (lambda batch: batch.exclude("attention_mask"), "padded"),
        (lambda batch: batch.exclude("input_ids"), "padded"),
        (lambda batch: batch.set("attention_mask", batch["attention_mask"][:, :-1]), "padded"),
    ],
)
def test_only_padded_rows_can_be_run(spoil: Any, message: str) -> None:
    check_padded(make_batch(), frozenset(), where=WHERE)
    with pytest.raises(Refused, match=message):
        check_padded(spoil(make_batch()), frozenset(), where=WHERE)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda batch: batch.exclude("teacher_ids"),
        lambda batch: batch.set("teacher_ids", batch["teacher_ids"][:, :-1]),
        lambda batch: batch.set("teacher_ids", batch["teacher_ids"][..., 0]),
        lambda batch: batch.set("teacher_ids", batch["teacher_ids"].float()),
    ],
)
def test_top_log_probs_need_the_ids_that_they_are_of(spoil: Any) -> None:
    top = frozenset({"top_log_probs"})
    check_padded(with_teacher(make_batch()), top, where=WHERE)
    check_padded(spoil(with_teacher(make_batch())), frozenset({"log_probs"}), where=WHERE)
    with pytest.raises(Refused, match=rf"teacher_ids(.|\n)*{WHERE}"):
        check_padded(spoil(with_teacher(make_batch())), top, where=WHERE)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_temperature_is_above_0(temperature: float) -> None:
    with pytest.raises(Refused, match=rf"above 0(.|\n)*{WHERE}(.|\n)*temperature 1"):
        check_request(LIMITS, PolicyLoss(), frozenset(), temperature=temperature, forward_only=True, where=WHERE)


def test_a_loss_must_come_from_the_models_outputs() -> None:
    check_loss(torch.ones((), requires_grad=True), PolicyLoss(), where=WHERE)
    with pytest.raises(Refused, match=rf"no gradient(.|\n)*{WHERE}"):
        check_loss(torch.ones(()), PolicyLoss(), where=WHERE)
