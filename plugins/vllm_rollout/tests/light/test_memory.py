"""Memory that sleeps and wakes, by an account of what a vLLM on GPU would hold. No GPU, and no vLLM."""

from __future__ import annotations

import pytest

from core.errors import Refused
from manymesh_vllm.memory import SleepingMemory


class Account:
    """vLLM's rules of sleep: both kinds go together from wide awake, and come back by tag."""

    def __init__(self) -> None:
        self.held = {"weights", "kv_cache"}
        self.valid = True  # the weights are what they were
        self.calls: list[object] = []

    def sleep(self, level: int) -> None:
        assert self.held == {"weights", "kv_cache"}, "vLLM unmaps memory that it has unmapped"
        self.calls.append(level)
        self.held, self.valid = set(), level == 1

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(tuple(tags))
        assert not self.held & set(tags)
        self.held |= set(tags)


@pytest.fixture
def account() -> Account:
    return Account()


@pytest.fixture
def memory(account: Account) -> SleepingMemory:
    return SleepingMemory(account, can_sleep=True)


def test_a_worker_that_releases_all_takes_weights_first_and_the_kv_cache_last(
    account: Account, memory: SleepingMemory
) -> None:
    memory.release(["weights", "kv_cache"])
    assert (account.held, memory.asleep) == (set(), {"weights", "kv_cache"})
    memory.resume(["weights"])
    assert (account.held, memory.asleep) == ({"weights"}, {"kv_cache"})
    memory.resume(["kv_cache"])
    assert (account.held, memory.asleep) == ({"weights", "kv_cache"}, frozenset())
    assert account.calls == [2, ("weights",), ("kv_cache",)]


def test_a_kv_cache_released_alone_leaves_the_weights_valid(account: Account, memory: SleepingMemory) -> None:
    memory.release(["kv_cache"])
    assert (account.held, account.valid) == ({"weights"}, True)
    memory.release(["kv_cache"])
    memory.resume(["weights", "kv_cache"])
    assert account.calls == [1, ("weights",), ("kv_cache",)]


@pytest.mark.parametrize("first", ["weights", "kv_cache"])
def test_what_is_released_one_after_the_other_is_all_released(
    account: Account, memory: SleepingMemory, first: str
) -> None:
    [second] = {"weights", "kv_cache"} - {first}
    memory.release([first])
    assert account.held == {second}
    memory.release([second])
    assert (account.held, account.valid) == (set(), False)


def test_resume_without_release_touches_nothing(account: Account, memory: SleepingMemory) -> None:
    memory.resume(["weights", "kv_cache"])
    assert account.calls == []


def test_an_engine_that_frees_nothing_refuses_to_release_and_may_resume(account: Account) -> None:
    memory = SleepingMemory(account, can_sleep=False)
    with pytest.raises(Refused, match="frees nothing on CPU"):
        memory.release(["kv_cache"])
    memory.resume(["weights", "kv_cache"])
    assert account.calls == []
