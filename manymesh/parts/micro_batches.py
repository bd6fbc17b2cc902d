"""What `forward_backward` refuses before it runs anything: requests and micro-batches that no engine can take."""

from __future__ import annotations

from collections.abc import Collection

import torch
from tensordict import TensorDict

from core.batch import is_jagged
from core.columns import check_model_inputs
from core.errors import Refused
from core.loss import LossFn
from core.manifest import Limits


def check_request(
    limits: Limits,
    loss_fn: LossFn | None,
    outputs: frozenset[str],
    *,
    temperature: float,
    forward_only: bool,
    where: str,
) -> frozenset[str]:
    """The outputs that the model must make: what the loss needs, and in a forward pass what is asked for.

    Args:
        where: method, as errors name it.

    Raises:
        Refused: an output that the engine doesn't have, training without a loss, or a temperature that isn't above 0.
    """
    needs = frozenset(loss_fn.needs) if loss_fn is not None else frozenset()
    if unknown := sorted((needs | outputs) - limits.outputs):
        raise Refused(f"the engine has no outputs {unknown}", want=f"some of {sorted(limits.outputs)}", where=where)
    if loss_fn is None and not forward_only:
        raise Refused("training needs a loss", where=where, mend="pass loss_fn, or forward_only=True")
    if not temperature > 0:
        raise Refused(
            "a temperature is above 0",
            have=temperature,
            where=where,
            mend="score greedy rows, sampled at temperature 0, at temperature 1",
        )
    return needs | outputs if forward_only else needs


def check_padded(batch: TensorDict, outputs: frozenset[str], *, where: str, inputs: Collection[str] = ()) -> None:
    """Raises Refused for a micro-batch that isn't padded, (rows, tokens), that lacks the ids which `outputs` are of, or
    has model inputs that the engine doesn't read.

    Args:
        inputs: those that it reads, as its manifest names them.
    """
    check_model_inputs(batch.keys(), inputs, "the engine")
    ids, mask = batch.get("input_ids", None), batch.get("attention_mask", None)
    if ids is None or mask is None or is_jagged(ids) or ids.ndim != 2 or ids.shape != mask.shape:
        raise Refused(
            "a micro-batch is padded: input_ids and attention_mask of (rows, tokens)",
            have={name: "jagged" if is_jagged(value) else tuple(value.shape) for name, value in batch.items()},
            where=where,
            mend="use core.batch.to_padded",
        )
    teacher_ids = batch.get("teacher_ids", None)
    fits = teacher_ids is not None and teacher_ids.ndim == 3 and teacher_ids.shape[:2] == ids.shape
    if "top_log_probs" in outputs and not (fits and teacher_ids.dtype == torch.int64 and teacher_ids.shape[2]):
        raise Refused(
            "top_log_probs are of the ids in the column teacher_ids, int64 (rows, tokens, k)",
            have="no such column" if teacher_ids is None else f"{teacher_ids.dtype} {tuple(teacher_ids.shape)}",
            want=f"int64 {tuple(ids.shape)} and k, at least 1",
            where=where,
        )


def check_loss(loss: torch.Tensor, loss_fn: LossFn, *, where: str) -> None:
    """Raises Refused for a loss that backward cannot begin with."""
    if not loss.requires_grad:
        raise Refused(
            "the loss depends on no output of the model, so it has no gradient",
            have=f"needs {sorted(loss_fn.needs)}",
            where=where,
            mend="compute the loss from the outputs that it needs, without detaching them",
        )
