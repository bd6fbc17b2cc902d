"""Which weights a rollout has: the same questions to every backend, about updates that end otherwise and memory."""

from __future__ import annotations

import pytest

from core.errors import Refused
from core.manifest import Capability
from core.rollout import MemoryTag, ReleasingRollout, Rollout
from manymesh.parts.rollout_checks import releasing, resume_memory
from manymesh.parts.weight_state import RELEASE_ORDER, RESUME_ORDER
from sdk.conformance.base import absent, offered
from sdk.conformance.suites.rollout_base import buckets, prompts, specs, update
from sdk.conformance.suites.rollout_weights import NORM, WeightSuite


class StateSuite(WeightSuite):
    """What manymesh.parts.weight_state says, asked of a backend."""

    def generates_nothing(self, rollout: Rollout) -> bool:
        """Whether it has no version, and says so when asked to sample."""
        with pytest.raises(Refused):
            rollout.generate(prompts([5]), self.greedy(2))
        return rollout.weight_version is None

    # -------------------------------------------------------------------------------------------------- updates

    def test_an_update_that_is_aborted_before_its_first_bucket_leaves_the_old_weights(self, live: Rollout) -> None:
        for version in (1, 2):
            live.begin_weight_update(specs(self.models.weights(2)), version)
            assert self.generates_nothing(live)
            live.load_bucket([])  # of nothing, which changes nothing
            live.abort_weight_update()
            assert live.weight_version == 0
        assert self.is_model(live, 1)

    def test_an_update_begun_over_one_of_which_nothing_came_still_gives_the_old_weights_back(
        self, live: Rollout
    ) -> None:
        for version in (1, 2):
            live.begin_weight_update(specs(self.models.weights(2)), version)
        live.abort_weight_update()
        assert live.weight_version == 0
        assert self.is_model(live, 1)

    def test_a_refused_bucket_alone_leaves_the_old_weights_whole(self, live: Rollout) -> None:
        live.begin_weight_update(specs(self.models.weights(2)), 1)
        with pytest.raises(Refused):
            live.load_bucket([("model.strange", self.models.weights(2)[NORM])])
        live.abort_weight_update()
        assert live.weight_version == 0
        assert self.is_model(live, 1)

    def test_an_update_of_which_nothing_came_cannot_be_finished(self, live: Rollout) -> None:
        weights = self.models.weights(2)
        live.begin_weight_update(specs(weights), 1)
        with pytest.raises(Refused) as raised:
            live.finish_weight_update()
        assert NORM in str(raised.value) or f"{len(weights)} of the weights" in str(raised.value)
        assert self.generates_nothing(live)
        for bucket in buckets(weights):
            live.load_bucket(bucket)
        live.finish_weight_update()
        assert (live.weight_version, self.is_model(live, 2)) == (1, True)

    def test_without_an_update_nothing_is_loaded_or_finished_and_an_abort_changes_nothing(self, live: Rollout) -> None:
        bucket = next(buckets(self.models.weights(2)))
        for _ in range(2):
            for call in (lambda: live.load_bucket(bucket), live.finish_weight_update):
                with pytest.raises(Refused):
                    call()
            live.abort_weight_update()
        assert (live.weight_version, self.is_model(live, 1)) == (0, True)

    # --------------------------------------------------------------------------------------------------- memory

    @offered(Capability.RELEASE)
    def test_it_releases_memory_as_its_manifest_says(self, rollout: Rollout) -> None:
        assert isinstance(rollout, ReleasingRollout)

    @offered(Capability.RELEASE)
    def test_released_weights_wait_for_resume_and_a_whole_update(self, live: Rollout) -> None:
        rollout = releasing(live)
        for _ in range(2):
            rollout.release(["weights"])
            assert self.generates_nothing(rollout)
            with pytest.raises(Refused, match="resume"):
                rollout.begin_weight_update(specs(self.models.weights(2)), 1)
        rollout.resume(["weights"])
        assert self.generates_nothing(rollout)
        update(rollout, self.models.weights(2), 1)
        assert self.is_model(rollout, 2)

    @offered(Capability.RELEASE)
    @pytest.mark.parametrize("order", [RESUME_ORDER, RELEASE_ORDER], ids=["weights first", "kv_cache first"])
    def test_memory_comes_back_in_either_order_and_nothing_is_sampled_before_all_is_there(
        self, live: Rollout, order: tuple[MemoryTag, ...]
    ) -> None:
        rollout = releasing(live)
        rollout.release(RELEASE_ORDER)
        first, second = order
        rollout.resume([first])
        assert self.generates_nothing(rollout)
        if first == "weights":  # as workers do it: the cache takes what the update has left
            update(rollout, self.models.weights(2), 1)
            with pytest.raises(Refused, match="kv_cache"):
                rollout.generate(prompts([5]), self.greedy(2))
            rollout.resume([second])
        else:
            with pytest.raises(Refused, match="resume"):
                rollout.begin_weight_update(specs(self.models.weights(2)), 1)
            rollout.resume([second])
            assert self.generates_nothing(rollout)
            update(rollout, self.models.weights(2), 1)
        assert (rollout.weight_version, self.is_model(rollout, 2)) == (1, True)

    @offered(Capability.RELEASE)
    def test_a_released_kv_cache_leaves_the_weights_valid(self, live: Rollout) -> None:
        rollout = releasing(live)
        rollout.release(["kv_cache"])
        assert rollout.weight_version == 0
        with pytest.raises(Refused, match="kv_cache"):
            rollout.generate(prompts([5]), self.greedy(2))
        rollout.resume(["kv_cache"])
        assert (rollout.weight_version, self.is_model(rollout, 1)) == (0, True)

    @offered(Capability.RELEASE)
    @pytest.mark.parametrize("num_buckets", [0, 5])
    def test_a_release_in_the_midst_of_an_update_ends_the_update(self, live: Rollout, num_buckets: int) -> None:
        rollout, weights = releasing(live), self.models.weights(2)
        rollout.begin_weight_update(specs(weights), 1)
        for _, bucket in zip(range(num_buckets), buckets(weights), strict=False):
            rollout.load_bucket(bucket)
        rollout.release(["weights"])
        *_, unsent = buckets(weights)
        for call in (lambda: rollout.load_bucket(unsent), rollout.finish_weight_update):
            with pytest.raises(Refused):
                call()
        for step in (rollout.abort_weight_update, lambda: rollout.resume(["weights"]), rollout.abort_weight_update):
            step()
            assert self.generates_nothing(rollout)
        update(rollout, weights, 2)
        assert (rollout.weight_version, self.is_model(rollout, 2)) == (2, True)

    @absent(Capability.RELEASE)
    def test_memory_that_it_cannot_free_is_not_released(self, live: Rollout) -> None:
        for tags in (["weights"], ["kv_cache"], ["weights", "kv_cache"]):
            with pytest.raises(Refused):
                releasing(live).release(tags)  # type: ignore[arg-type]
        assert (live.weight_version, self.is_model(live, 1)) == (0, True)

    def test_resume_of_what_is_not_released_changes_nothing(self, live: Rollout) -> None:
        resume_memory(live, RESUME_ORDER)
        assert (live.weight_version, self.is_model(live, 1)) == (0, True)

    def test_unknown_tags_are_refused(self, live: Rollout) -> None:
        with pytest.raises(Refused, match=r"optimizer|without release"):
            releasing(live).release(["weights", "optimizer"])  # type: ignore[list-item]
        assert live.weight_version == 0
