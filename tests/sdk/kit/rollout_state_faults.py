"""Faults of which weights a rollout says that it has, and of its memory."""

from __future__ import annotations

from collections.abc import Sequence

from core.engine import WeightSpec
from manymesh.parts.base_rollout import Bucket
from tests.sdk.kit.faults import caught_by
from tests.sdk.kit.rollout_faults import RolloutFault


@caught_by("test_without_the_directorys_weights_it_has_none_until_a_whole_update")
class ClaimsWeights(RolloutFault):
    """claims a version before any weights were loaded"""

    @property
    def weight_version(self) -> int | None:
        version: int | None = super().weight_version
        return 0 if version is None and self._config.load == "none" else version


@caught_by("test_an_update_that_is_aborted_before_its_first_bucket_leaves_the_old_weights")
class LosesWeights(RolloutFault):
    """has no weights after an update of which nothing came was aborted"""

    def abort_weight_update(self) -> None:
        if self.weight_version is None:
            super().load_bucket(list(self.own_weights().items())[:1])  # type: ignore[misc]
        super().abort_weight_update()  # type: ignore[misc]


@caught_by("test_an_update_begun_over_one_of_which_nothing_came_still_gives_the_old_weights_back")
class LosesWeightsInBegin(RolloutFault):
    """has no weights to go back to once a second update was begun"""

    def begin_weight_update(self, weight_specs: Sequence[WeightSpec], version: int) -> None:
        if self.weight_version is None:
            super().load_bucket(list(self.own_weights().items())[:1])  # type: ignore[misc]
        super().begin_weight_update(weight_specs, version)  # type: ignore[misc]


@caught_by("test_a_refused_bucket_alone_leaves_the_old_weights_whole")
class BreaksBeforeItChecks(RolloutFault):
    """gives its weights up for a bucket that it then refuses"""

    def load_bucket(self, bucket: Bucket) -> None:
        if self.weight_version is None and len(bucket) == 1 and bucket[0][0] not in (own := self.own_weights()):
            super().load_bucket(list(own.items())[:1])  # type: ignore[misc]
        super().load_bucket(bucket)  # type: ignore[misc]


@caught_by("test_an_update_of_which_nothing_came_cannot_be_finished")
class FinishesNothing(RolloutFault):
    """finishes an update of which nothing came with the weights that it has"""

    _loaded = False

    def begin_weight_update(self, weight_specs: Sequence[WeightSpec], version: int) -> None:
        super().begin_weight_update(weight_specs, version)  # type: ignore[misc]
        self._loaded = False

    def load_bucket(self, bucket: Bucket) -> None:
        super().load_bucket(bucket)  # type: ignore[misc]
        self._loaded = True

    def finish_weight_update(self) -> None:
        if self.weight_version is None and not self._loaded:
            super().load_bucket(list(self.own_weights().items()))  # type: ignore[misc]
        super().finish_weight_update()  # type: ignore[misc]


@caught_by("test_without_an_update_nothing_is_loaded_or_finished_and_an_abort_changes_nothing")
class PassesOver(RolloutFault):
    """passes over buckets that no update has announced"""

    def load_bucket(self, bucket: Bucket) -> None:
        if self.weight_version is None:
            super().load_bucket(bucket)  # type: ignore[misc]


@caught_by("test_a_release_in_the_midst_of_an_update_ends_the_update[5]")
class UpdatesOn(RolloutFault):
    """goes on with an update whose weights are released"""

    def release(self, tags: Sequence[str]) -> None:
        if self.weight_version is not None:
            super().release(tags)  # type: ignore[misc]


@caught_by("test_a_release_in_the_midst_of_an_update_ends_the_update[0]")
class RevivesReleased(RolloutFault):
    """takes resumed memory for the old weights when an update is aborted"""

    _revived = False

    @property
    def weight_version(self) -> int | None:
        version: int | None = super().weight_version
        return 0 if version is None and self._revived else version

    def abort_weight_update(self) -> None:
        super().abort_weight_update()  # type: ignore[misc]
        self._revived = True


@caught_by(
    "test_memory_comes_back_in_either_order_and_nothing_is_sampled_before_all_is_there[weights first]",
    "test_a_released_kv_cache_leaves_the_weights_valid",
)
class SamplesWithoutCache(RolloutFault):
    """generates while its KV cache is released"""

    def release(self, tags: Sequence[str]) -> None:
        super().release([tag for tag in tags if tag != "kv_cache"])  # type: ignore[misc]


@caught_by("test_memory_comes_back_in_either_order_and_nothing_is_sampled_before_all_is_there[kv_cache first]")
class ResumesAll(RolloutFault):
    """takes all memory again when it is asked for some"""

    def resume(self, tags: Sequence[str]) -> None:
        super().resume(["weights", "kv_cache"])  # type: ignore[misc]


@caught_by("test_released_weights_wait_for_resume_and_a_whole_update")
class GeneratesAfterRelease(RolloutFault):
    """generates after its weights were released"""

    def release(self, tags: Sequence[str]) -> None:
        super().release([])  # type: ignore[misc]


@caught_by("test_a_released_kv_cache_leaves_the_weights_valid")
class ReleasesAll(RolloutFault):
    """releases the weights with the KV cache"""

    def release(self, tags: Sequence[str]) -> None:
        super().release([*tags, "weights"])  # type: ignore[misc]


@caught_by("test_resume_of_what_is_not_released_changes_nothing")
class ResumesAnyway(RolloutFault):
    """takes new memory for weights that have theirs"""

    def resume(self, tags: Sequence[str]) -> None:
        super().release(["weights"])  # type: ignore[misc]
        super().resume(tags)  # type: ignore[misc]


@caught_by("test_unknown_tags_are_refused")
class AcceptsTags(RolloutFault):
    """passes over tags that it doesn't know"""

    def release(self, tags: Sequence[str]) -> None:
        super().release([tag for tag in tags if tag in ("weights", "kv_cache")])  # type: ignore[misc]
