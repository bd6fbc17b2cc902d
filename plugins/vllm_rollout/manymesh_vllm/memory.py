"""Giving an engine's memory back and taking it again, by vLLM's sleep mode."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from core.errors import Refused


class SleepingMemory:
    """Which of "weights" and "kv_cache" have no memory at the moment.

    vLLM puts both to sleep together and wakes them one by one, so that what shall stay is woken again at once: from
    the host's memory where it is the weights.

    Args:
        llm: vllm.LLM.
        can_sleep: whether the engine was built so that it frees memory.
    """

    def __init__(self, llm: Any, *, can_sleep: bool) -> None:
        self._llm, self._can_sleep = llm, can_sleep
        self.asleep: frozenset[str] = frozenset()

    def check_can_sleep(self) -> None:
        """Raises Refused where vLLM would free nothing."""
        if not self._can_sleep:
            raise Refused(
                "this rollout cannot give its memory back",
                have="vLLM's sleep mode frees nothing on CPU, and on CUDA only with sleep_mode",
                mend="turn release_after_generate off, or set sleep_mode on CUDA",
            )

    def release(self, tags: Iterable[str]) -> None:
        """Raises Refused as check_can_sleep."""
        self.check_can_sleep()
        wanted = self.asleep | set(tags)
        if wanted == self.asleep:
            return
        if self.asleep:  # vLLM sleeps from being wide awake
            self._llm.wake_up(sorted(self.asleep, reverse=True))
        # Level 2 drops the weights, level 1 moves them to the host.
        self._llm.sleep(level=2 if "weights" in wanted else 1)
        if stays := sorted({"weights", "kv_cache"} - wanted):
            self._llm.wake_up(stays)
        self.asleep = wanted

    def resume(self, tags: Iterable[str]) -> None:
        """Tags that are not asleep are left as they are, so that this is a no-op where nothing was released."""
        if waking := sorted(self.asleep & set(tags), reverse=True):
            self._llm.wake_up(waking)
            self.asleep -= set(waking)
