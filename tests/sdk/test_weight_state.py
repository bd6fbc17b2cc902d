"""Which weights a rollout has, over sequences of events: no version is claimed that nobody loaded as a whole."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from core.errors import Refused
from manymesh.parts.weight_state import (
    RELEASE_ORDER,
    RESUME_ORDER,
    Broken,
    Released,
    State,
    Updating,
    Valid,
    WeightState,
)

NAMES = ("a", "b", "c")
TAGS = st.sets(st.sampled_from(["weights", "kv_cache"]))


class Memory(RuleBasedStateMachine):
    """An engine by its memory alone: the version that each tensor was loaded with, 0 at first; None is garbage.

    What the state says is compared with what the memory holds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weights = WeightState()
        self.held: dict[str, int | None] | None = dict.fromkeys(NAMES, 0)
        self.staged: dict[str, int] = {}
        self.has_kv_cache = True
        self.version = 0
        self.in_place = True
        self.is_overwritten = False  # since weights were valid

    @rule(in_place=st.booleans())
    def begin(self, in_place: bool) -> None:
        before = self.weights.state
        self.version += 1
        if self.held is None:
            with pytest.raises(Refused, match=r"resume\(\['weights'\]\)"):
                self.weights.begin(self.version, NAMES)
            assert self.weights.state == before
            return
        self.weights.begin(self.version, NAMES)
        self.in_place, self.staged = in_place, {}
        assert self.weights.update().to == self.version
        assert list(self.weights.update().missing) == list(NAMES)

    @rule(names=st.sets(st.sampled_from(NAMES), min_size=1))
    def load(self, names: set[str]) -> None:
        if not self.weights.is_updating:
            for call in (lambda: self.weights.loading(in_place=True), lambda: self.weights.loaded(names)):
                with pytest.raises(Refused, match="begin_weight_update"):
                    call()
            return
        is_first = not self.weights.update().has_started
        assert self.weights.loading(in_place=self.in_place) == is_first
        assert self.weights.loading(in_place=self.in_place) is False
        target = self.held if self.in_place else self.staged
        assert target is not None
        for name in names:
            target[name] = self.weights.update().to
        self.weights.loaded(names)
        self.is_overwritten |= self.in_place

    @rule()
    def fail_to_load(self) -> None:
        """The engine raised: nobody knows what of the bucket it has."""
        if self.weights.is_updating and self.in_place and self.held is not None:
            self.weights.loading(in_place=True)
            self.held["a"], self.is_overwritten = None, True

    @rule()
    def finish(self) -> None:
        before, updating = self.weights.state, self.weights.is_updating
        if updating and not self.weights.update().missing:
            self.weights.loading(in_place=True)
            assert self.held is not None
            self.held |= self.staged
            self.staged = {}
            to = self.weights.update().to
            if set(self.held.values()) == {to}:
                self.weights.finish()
                assert self.weights.version == to
                self.is_overwritten = False
                return
            self.is_overwritten = True
            self.weights.abort()  # a bucket failed and came again in part: the rollout's call fails before
            return
        with pytest.raises(Refused, match="have not come" if updating else "no weight update"):
            self.weights.finish()
        assert self.weights.state == before

    @rule()
    def abort(self) -> None:
        before = self.weights.state
        held_some = self.weights.abort()
        assert held_some == (isinstance(before, Updating) and before.has_started)
        assert self.weights.state == (before.old if isinstance(before, Updating) else before)
        assert self.weights.abort() is False
        self.staged = {}

    @rule(tags=TAGS)
    def release(self, tags: set[str]) -> None:
        going = self.weights.to_release(tags)
        assert [tag for tag in RELEASE_ORDER if tag in going] == list(going)
        assert not set(going) & self.weights.released
        self.weights.release(going)
        assert self.weights.released >= tags
        if "weights" in tags:
            self.held, self.staged, self.is_overwritten = None, {}, True
        self.has_kv_cache &= "kv_cache" not in tags

    @rule(tags=TAGS)
    def resume(self, tags: set[str]) -> None:
        before, coming = self.weights.state, self.weights.to_resume(tags)
        assert [tag for tag in RESUME_ORDER if tag in coming] == list(coming)
        self.weights.resume(coming)
        assert not self.weights.released & tags
        if "weights" in tags and self.held is None:
            self.held = dict.fromkeys(NAMES, None)
            assert self.weights.state == Broken()
        else:
            assert self.weights.state == before
        self.has_kv_cache |= "kv_cache" in tags

    @invariant()
    def a_version_is_that_of_every_tensor_in_memory(self) -> None:
        if self.weights.version is not None:
            assert self.held is not None
            assert set(self.held.values()) == {self.weights.version}

    @invariant()
    def weights_of_which_nothing_was_overwritten_are_not_given_up(self) -> None:
        if self.held is not None and not self.is_overwritten:
            state = self.weights.state
            assert isinstance(state.old if isinstance(state, Updating) else state, Valid)

    @invariant()
    def only_what_is_whole_is_sampled_with(self) -> None:
        if isinstance(self.weights.state, Valid) and self.has_kv_cache:
            assert self.weights.check_can_sample() == self.weights.version
        else:
            with pytest.raises(Refused):
                self.weights.check_can_sample()

    @invariant()
    def released_is_what_has_no_memory(self) -> None:
        assert ("weights" in self.weights.released) == (self.held is None) == (self.weights.state == Released())
        assert ("kv_cache" in self.weights.released) != self.has_kv_cache

    @precondition(lambda self: self.weights.is_updating)
    @invariant()
    def an_update_under_way_can_go_back_only_to_weights_that_are_whole(self) -> None:
        old = self.weights.update().old
        if isinstance(old, Valid):
            assert self.held is not None
            assert set(self.held.values()) == {old.version}


TestMemory = Memory.TestCase
TestMemory.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize(("in_place", "state"), [(None, Valid(0)), (False, Valid(0)), (True, Broken())])
def test_an_update_that_is_begun_again_keeps_what_an_abort_gives_back(in_place: bool | None, state: State) -> None:
    weights = WeightState()
    weights.begin(1, NAMES)
    if in_place is not None:
        weights.loading(in_place=in_place)
    weights.begin(2, NAMES)
    weights.abort()
    assert weights.state == state


def test_refusals_say_what_to_do() -> None:
    weights = WeightState()
    with pytest.raises(Refused, match=r"version 0[\s\S]*version 1"):
        weights.check_can_sample(1)
    weights.release(["kv_cache"])
    with pytest.raises(Refused, match=r"KV cache is released[\s\S]*resume\(\['kv_cache'\]\)"):
        weights.check_can_sample()
    assert weights.check_valid() == 0
    weights.begin(1, NAMES)
    with pytest.raises(Refused, match=r"3 of the weights[\s\S]*\[a, b, c\]"):
        weights.finish()
    with pytest.raises(Refused, match="under way"):
        weights.check_valid()
    weights.release(["weights"])
    with pytest.raises(Refused, match="weights released"):
        weights.check_valid()
    weights.resume(["weights"])
    with pytest.raises(Refused, match="not finished"):
        weights.check_valid()
    with pytest.raises(Refused, match="optimizer"):
        weights.to_release(["optimizer"])


def test_memory_goes_kv_cache_first_and_comes_back_weights_first() -> None:
    weights = WeightState()
    both = ("weights", "kv_cache")
    assert weights.to_release(both) == ("kv_cache", "weights")
    weights.release(both)
    assert (weights.to_release(both), weights.to_resume(both)) == ((), both)
    weights.resume(["weights"])
    assert weights.to_resume(both) == ("kv_cache",)


def test_it_is_pure() -> None:
    code = "import sys, manymesh.parts.weight_state; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
