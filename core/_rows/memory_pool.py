"""Memory for rows that is used again.

A copy into fresh memory costs more in page faults than in copying. Here memory that nothing refers to any more is
used again. Each array has a buffer of its own, so that a kept column does not keep the memory of others.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np

SMALL_BYTES = 32 << 10  # below it malloc has memory at hand
KEPT_BYTES = 512 << 20  # of buffers that nobody uses, in a process
MOST_BUFFERS = 256  # each is looked at for each new one


class MemoryPool:
    """A process's buffers, the last used ones at the end.

    Args:
        kept_bytes: of unused buffers so many are kept; the longest unused go.
    """

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept_bytes, self._lock = kept_bytes, threading.Lock()
        self._buffers = [np.empty(0, np.uint8)]
        # What a buffer counts that only the list has. Every view of it, and every tensor on a view, counts one more:
        # numpy makes the owner of the memory the base of each.
        [self._alone] = map(sys.getrefcount, self._buffers)

    def take(self, num_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Memory of so many bytes, of whatever content. It is the taker's as long as anything refers to it."""
        if num_bytes < SMALL_BYTES:
            return np.empty(num_bytes, np.uint8)
        with self._lock:
            free = [count == self._alone for count in map(sys.getrefcount, self._buffers)]
            fits = [
                (len(buffer), at)
                for at, buffer in enumerate(self._buffers)
                if free[at] and num_bytes <= len(buffer) <= 2 * num_bytes
            ]
            if fits:
                buffer = self._buffers.pop(min(fits)[1])
            else:
                buffer = np.empty(num_bytes, np.uint8)
                self._drop(free, num_bytes)
            self._buffers.append(buffer)
            return buffer[:num_bytes]

    def _drop(self, free: list[bool], num_bytes: int) -> None:
        """Make room for a new buffer."""
        unused = sum(len(buffer) for buffer, is_free in zip(self._buffers, free, strict=True) if is_free)
        buffers = []
        for buffer, is_free in zip(self._buffers, free, strict=True):
            if is_free and unused + num_bytes > self._kept_bytes:
                unused -= len(buffer)
            else:
                buffers.append(buffer)
        self._buffers = buffers[-MOST_BUFFERS:]  # those that go while in use live on with who uses them

    def copy(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """A private, contiguous copy."""
        if array.nbytes < SMALL_BYTES or array.dtype.hasobject:
            return array.copy()
        out: np.ndarray[Any, Any] = self.take(array.nbytes).view(array.dtype).reshape(array.shape)
        np.copyto(out, array)
        return out


MEMORY_POOL = MemoryPool()
