"""Memory that is used again, and never while anybody refers to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core._rows.memory_pool import MOST_BUFFERS, SMALL_BYTES, MemoryPool
from core._rows.wire import decode, encode

SIZE = 4 * SMALL_BYTES


def address(array: np.ndarray[Any, Any]) -> int:
    return array.ctypes.data


def test_memory_that_nobody_refers_to_is_used_again() -> None:
    pool = MemoryPool()
    first = address(pool.take(SIZE))
    assert address(pool.take(SIZE)) == first
    assert address(pool.take(SIZE * 3 // 4)) == first


def test_a_much_smaller_array_does_not_sit_on_a_large_buffer() -> None:
    pool = MemoryPool()
    first = address(pool.take(4 * SIZE))
    assert address(pool.take(SIZE)) != first


@pytest.mark.parametrize(
    "keep",
    [
        lambda array: array,
        lambda array: array[10:20],
        lambda array: array.view(np.float32)[3:][1:],
        lambda array: torch.from_numpy(array),
        lambda array: torch.from_numpy(array)[5:6].view(torch.uint8),
        lambda array: torch.from_numpy(array.view(np.int64)).numpy()[:2],
        lambda array: memoryview(array),
        lambda array: torch.nn.Parameter(torch.from_numpy(array.view(np.float32))[7]).detach(),
    ],
)
def test_whatever_refers_to_memory_keeps_it(keep: Any) -> None:
    pool = MemoryPool()
    array = pool.take(SIZE)
    first = address(array)
    copy = keep(array)
    del array
    assert address(pool.take(SIZE)) != first
    del copy
    assert first in {address(pool.take(SIZE)), address(pool.take(SIZE))}


def test_arrays_that_hold_objects_are_copied_all_the_same() -> None:
    array = np.zeros(SMALL_BYTES, [("row", np.int64), ("object", object)])
    array["object"][3] = "x"
    copied = MemoryPool().copy(array)
    assert (copied["object"][3], copied["row"].sum()) == ("x", 0)


def test_of_unused_memory_only_so_much_is_kept() -> None:
    pool = MemoryPool(kept_bytes=3 * SIZE)
    buffers = [pool.take(SIZE) for _ in range(8)]
    del buffers
    pool.take(3 * SIZE)
    assert sum(map(len, pool._buffers)) <= 4 * SIZE


def test_buffers_that_are_forgotten_in_use_stay_whole() -> None:
    pool = MemoryPool()
    buffers = [pool.copy(np.full(SMALL_BYTES, i % 251, np.uint8)) for i in range(MOST_BUFFERS + 30)]
    assert len(pool._buffers) <= MOST_BUFFERS + 1
    assert all((array == i % 251).all() for i, array in enumerate(buffers))


@given(st.lists(st.tuples(st.integers(1, 6), st.booleans()), max_size=30))
def test_arrays_that_are_alive_never_share_memory(takes: list[tuple[int, bool]]) -> None:
    pool = MemoryPool(kept_bytes=4 * SMALL_BYTES)
    alive: list[tuple[int, np.ndarray[Any, Any]]] = []
    for number, (size, drop) in enumerate(takes):
        array = pool.take(size * SMALL_BYTES)
        array[:] = number
        alive.append((number, array))
        if drop:
            alive.pop(len(alive) // 2)
        del array
    assert all((array == number).all() for number, array in alive)


@pytest.mark.parametrize("value", [np.arange(SIZE).reshape(4, -1).T, torch.arange(SIZE).view(2, -1)])
def test_what_a_worker_is_given_is_its_own_and_stays_as_it_is_by_later_calls(value: Any) -> None:
    encoded_value = encode(value)
    mine = decode(encoded_value)
    mine[0, 0] = -1
    column = mine[:, 0]
    want = column.tolist()
    del mine
    others = [decode(encode(value * 0)) for _ in range(3)]
    assert column.tolist() == want
    assert value[0, 0] == 0
    assert all((other == 0).all() for other in others)
