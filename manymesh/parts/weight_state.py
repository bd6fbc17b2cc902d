"""Which weights a rollout has: a pure state machine, without torch and I/O. The rollout calls its engine.

States: Valid(version), Updating(to), Broken, Released. Only Valid weights are sampled with.

| event   | from                              | to                                                        |
|---------|-----------------------------------|-----------------------------------------------------------|
| begin   | Valid, Broken, Updating           | Updating; an update that was under way is forgotten       |
| loading | Updating                          | Updating; the old weights are lost if loading is in place |
| loaded  | Updating                          | Updating, with fewer names missing                        |
| finish  | Updating of which nothing misses  | Valid(to)                                                 |
| abort   | Updating                          | Valid(old) where the old weights are whole, else Broken   |
| release | any                               | Released, if the tags have "weights"                      |
| resume  | Released                          | Broken, if the tags have "weights"                        |

Transitions that must not exist:

- Broken or Released to Valid without a whole update. Broken weights are some old and some new; resumed memory holds
  garbage. Both generate fluent text with log-probabilities of no model, which nobody notices downstream.
- Updating to Valid(to) while a name is missing: a rollout would claim a version that it doesn't have.
- Updating to Valid(old) once a tensor of the old weights was overwritten: the same, under the old version's name.
- Released to Updating: there is no memory to load into.

Memory has one order. `release` gives the KV cache back first and `resume` takes the weights first, for the cache is
computed from the weights, and between the two resumes comes the update: the trainer's copy of the weights is on the
device then, and what the cache will fill must still be free.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import attrs

from core.errors import Refused
from core.rollout import MemoryTag
from manymesh.parts.rollout_checks import check_tags, no_update, valid_version
from manymesh.parts.weight_names import some

RESUME_ORDER: tuple[MemoryTag, ...] = ("weights", "kv_cache")
RELEASE_ORDER: tuple[MemoryTag, ...] = ("kv_cache", "weights")


@attrs.frozen
class Valid:
    """The weights of one version, whole."""

    version: int


@attrs.frozen
class Broken:
    """Memory for weights, which holds those of no version."""


@attrs.frozen
class Released:
    """No memory for weights."""


@attrs.define
class Updating:
    """An update under way.

    Attributes:
        to: the version that it will have.
        old: what an abort leaves.
        missing: names that have not come, in the sender's order.
        has_started: the engine has been told that tensors come.
    """

    to: int
    old: Valid | Broken
    missing: dict[str, None]
    has_started: bool = False


State = Valid | Updating | Broken | Released


class WeightState:
    """The weights and the memory of a rollout that has been initialized, nothing released.

    Args:
        version: of the weights that it has; None where it has none yet, which is Broken.
    """

    def __init__(self, version: int | None = 0) -> None:
        self._state: State = Broken() if version is None else Valid(version)
        self._has_kv_cache = True

    @property
    def state(self) -> State:
        return self._state

    @property
    def version(self) -> int | None:
        """Of weights that are valid; None where there are none."""
        return self._state.version if isinstance(self._state, Valid) else None

    @property
    def is_updating(self) -> bool:
        return isinstance(self._state, Updating)

    @property
    def released(self) -> frozenset[MemoryTag]:
        """Tags without memory."""
        return frozenset(tag for tag in RESUME_ORDER if self._is_released(tag))

    def check_valid(self, min_version: int | None = None) -> int:
        """The version of weights that may be sampled with.

        Raises:
            Refused: there are no valid weights, or they are older than min_version.
        """
        return valid_version(self.version, min_version, self._describe())

    def check_can_sample(self, min_version: int | None = None) -> int:
        """As check_valid. Raises Refused too where the KV cache is released."""
        version = self.check_valid(min_version)
        if not self._has_kv_cache:
            raise Refused("the KV cache is released", mend="resume(['kv_cache']) before generating")
        return version

    # ------------------------------------------------------------------------------------------------ an update

    def begin(self, to: int, names: Iterable[str]) -> None:
        """An update to version `to` begins, of tensors by these names.

        Raises:
            Refused: the weights are released.
        """
        if isinstance(self._state, Released):
            raise Refused(
                "the rollout's weights are released, so there is nothing to load into",
                mend="resume(['weights']) before the update",
            )
        self.abort()
        self._state = Updating(to, cast(Valid | Broken, self._state), dict.fromkeys(names))

    def update(self) -> Updating:
        """The update under way. Raises Refused where there is none."""
        if not isinstance(self._state, Updating):
            raise no_update()
        return self._state

    def loading(self, *, in_place: bool) -> bool:
        """The engine is about to get tensors. Returns whether they are the first of the update.

        Args:
            in_place: they overwrite the old weights; False where they are kept apart until all have come.

        Raises:
            Refused: no update is under way.
        """
        update = self.update()
        is_first, update.has_started = not update.has_started, True
        if in_place:
            update.old = Broken()
        return is_first

    def loaded(self, names: Iterable[str]) -> None:
        """The engine has these tensors. Raises Refused where no update is under way."""
        missing = self.update().missing
        for name in names:
            missing.pop(name, None)

    def check_complete(self) -> int:
        """The version that the update will have.

        Raises:
            Refused: names are missing, or no update is under way.
        """
        update = self.update()
        if update.missing:
            raise Refused(
                f"{len(update.missing)} of the weights announced have not come",
                have=f"missing {some(update.missing)}",
                mend="load the rest and finish again, or begin a new update",
            )
        return update.to

    def finish(self) -> None:
        """The new weights are in use. Raises Refused as check_complete; nothing has changed then."""
        self._state = Valid(self.check_complete())

    def abort(self) -> bool:
        """Forget an update under way, if there is one. Returns whether the engine holds some of its tensors."""
        if not isinstance(self._state, Updating):
            return False
        has_started = self._state.has_started
        self._state = self._state.old
        return has_started

    # --------------------------------------------------------------------------------------------------- memory

    def to_release(self, tags: Iterable[str]) -> tuple[MemoryTag, ...]:
        """Of these tags, those that have memory, in the order to release them. Raises Refused for unknown tags."""
        return self._chosen(tags, RELEASE_ORDER, released=False)

    def release(self, tags: Sequence[str]) -> None:
        """Memory of these tags is about to go. An update under way is forgotten with the weights."""
        if "weights" in self.to_release(tags):
            self._state = Released()
        self._has_kv_cache &= "kv_cache" not in tags

    def to_resume(self, tags: Iterable[str]) -> tuple[MemoryTag, ...]:
        """Of these tags, those that are released, in the order to resume them. Raises Refused for unknown tags."""
        return self._chosen(tags, RESUME_ORDER, released=True)

    def resume(self, tags: Sequence[str]) -> None:
        """Memory of these tags is there again; that of weights holds garbage."""
        if "weights" in self.to_resume(tags):
            self._state = Broken()
        self._has_kv_cache |= "kv_cache" in tags

    def _is_released(self, tag: MemoryTag) -> bool:
        return isinstance(self._state, Released) if tag == "weights" else not self._has_kv_cache

    def _chosen(self, tags: Iterable[str], order: Sequence[MemoryTag], *, released: bool) -> tuple[MemoryTag, ...]:
        tags = frozenset(tags)
        check_tags(tags)
        return tuple(tag for tag in order if tag in tags and self._is_released(tag) == released)

    def _describe(self) -> str:
        if isinstance(self._state, Updating):
            return "a weight update under way"
        return "weights released" if isinstance(self._state, Released) else "weights of an update that was not finished"
