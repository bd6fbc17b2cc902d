"""Memory that sleeps and wakes, by an account of what a vLLM on GPU would hold. No GPU, and no vLLM."""

from __future__ import annotations

import pytest

from core.rollout import MemoryTag
from manymesh.parts.weight_state import RELEASE_ORDER, RESUME_ORDER, WeightState
from manymesh_vllm.memory import sleep_steps


class Account:
    """vLLM's rules of sleep: both kinds go together from wide awake, and come back by tag."""

    def __init__(self) -> None:
        self.held = {"weights", "kv_cache"}
        self.are_weights_kept = True
        self.calls: list[object] = []
        self.state = WeightState()

    def release(self, *tags: MemoryTag) -> None:
        """As BaseReleasingRollout does."""
        tags_to_free, released_tags = self.state.to_release(tags), self.state.released
        self.state.release(tags_to_free)
        for step in sleep_steps(tags_to_free, released_tags) if tags_to_free else ():
            if step.level is None:
                self.wake_up(*step.tags)
            else:
                self.sleep(step.level)

    def resume(self, *tags: MemoryTag) -> None:
        if coming := self.state.to_resume(tags):
            self.wake_up(*coming)
            self.state.resume(coming)

    def sleep(self, level: int) -> None:
        assert self.held == {"weights", "kv_cache"}, "vLLM unmaps memory that it has unmapped"
        self.calls.append(level)
        self.held, self.are_weights_kept = set(), level == 1

    def wake_up(self, *tags: str) -> None:
        self.calls.append(tags)
        assert not self.held & set(tags)
        self.held |= set(tags)


@pytest.fixture
def account() -> Account:
    return Account()


def test_a_worker_that_releases_all_takes_weights_first_and_the_kv_cache_last(account: Account) -> None:
    account.release(*RELEASE_ORDER)
    assert (account.held, account.state.released) == (set(), {"weights", "kv_cache"})
    account.resume("weights")
    assert (account.held, account.state.released) == ({"weights"}, {"kv_cache"})
    account.resume("kv_cache")
    assert (account.held, account.state.released) == ({"weights", "kv_cache"}, frozenset())
    assert account.calls == [2, ("weights",), ("kv_cache",)]


def test_a_kv_cache_released_alone_leaves_the_weights_valid(account: Account) -> None:
    account.release("kv_cache")
    assert (account.held, account.are_weights_kept, account.state.version) == ({"weights"}, True, 0)
    account.release("kv_cache")
    account.resume("weights", "kv_cache")
    assert account.calls == [1, ("weights",), ("kv_cache",)]


@pytest.mark.parametrize("order", [RELEASE_ORDER, RESUME_ORDER])
def test_what_is_released_one_after_the_other_is_all_released(account: Account, order: tuple[MemoryTag, ...]) -> None:
    first, second = order
    account.release(first)
    assert account.held == {second}
    account.release(second)
    assert (account.held, account.are_weights_kept) == (set(), False)


def test_resume_without_release_touches_nothing(account: Account) -> None:
    account.resume("weights", "kv_cache")
    assert account.calls == []
