"""The weights of a rollout that holds a whole live model: their version, updates in buckets, memory given away."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from core.engine import WeightSpec
from core.errors import Refused
from manymesh.parts.live_weights import WeightTable, WeightUpdate, drop, restore
from manymesh.parts.rollout_checks import no_update, valid_version


class VersionedWeights:
    """What `core.rollout.Rollout` says of weights, for a model whose memory is written in place.

    Versions: 0 at first, the update's after `finish`, None in between, after a failed update and after `release`, until
    a whole update was loaded.

    Args:
        model: a transformers model on its device.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._table = model, WeightTable(model)
        self._update: WeightUpdate | None = None
        self._dropped: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        self._version: int | None = 0
        self._whole: int | None = None  # while an update is under way: the version that is still whole

    @property
    def version(self) -> int | None:
        """None where the weights are not valid."""
        return self._version

    def valid(self, min_version: int | None) -> int:
        """The version to sample with. Raises Refused where there is none, or it is below min_version."""
        state = "a weight update under way" if self._update else "weights released or an update not finished"
        return valid_version(self._version, min_version, "weights released" if self._dropped else state)

    def release(self) -> None:
        """Free the parameters' memory on any device. Buffers (rotary tables) stay."""
        if not self._dropped:
            self._update, self._version = None, None
            self._dropped = drop(self._model)

    def resume(self) -> None:
        """Take memory again. It holds garbage, so that the version stays None until a whole update."""
        restore(self._dropped)
        self._dropped = []

    def begin(self, specs: Sequence[WeightSpec], version: int) -> None:
        """An update that was begun before and not finished is forgotten.

        Raises:
            Refused: names, shapes or kinds of dtype differ from the model's (dtypes of one kind are cast), or the
                weights are released. Nothing has changed then.
        """
        if self._dropped:
            raise Refused(
                "the rollout's weights are released, so there is nothing to load into",
                mend="resume(['weights']) before the update",
            )
        update = WeightUpdate(self._table, specs, version)
        if self._update is None:
            self._whole = self._version
        self._update, self._version = update, None

    def load(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Copy tensors into the model; they may be reused after return.

        Raises:
            Refused: no update was begun; a tensor was not announced, came before or has another shape. Nothing of the
                bucket is copied then.
        """
        update, self._whole = self._under_way(), None
        update.load(bucket)
        device = next(self._model.parameters()).device
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    def finish(self) -> None:
        """Raises Refused, with the names, when weights have not come; the version stays None then."""
        update = self._under_way()
        update.check_complete()
        self._update, self._version = None, update.version

    def abort(self) -> None:
        """Forget the update. Weights are written in place: if a bucket has come, the version stays None."""
        if self._update is not None:
            self._update, self._version = None, self._whole

    def _under_way(self) -> WeightUpdate:
        if self._update is None:
            raise no_update()
        return self._update
