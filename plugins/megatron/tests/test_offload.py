"""Memory that is parked on the host: its pieces, and that it comes back as it was."""

from __future__ import annotations

import pytest
import torch

from manymesh_megatron import offload
from manymesh_megatron.offload import Parked, chunks


def test_pieces_cover_a_buffer_and_none_is_too_large() -> None:
    gib = 2**30
    assert chunks(9 * gib + 5, gib) == [*((i * gib, (i + 1) * gib) for i in range(9)), (9 * gib, 9 * gib + 5)]
    assert chunks(7, gib) == [(0, 7)]
    assert chunks(gib, gib) == [(0, gib)]
    assert chunks(0, gib) == []


def test_no_piece_of_host_memory_is_larger_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    allocate = offload.host_memory

    def host_memory(num_bytes: int, *, pinned: bool) -> torch.Tensor:
        asked.append(num_bytes)
        return allocate(num_bytes, pinned=pinned)

    monkeypatch.setattr(offload, "host_memory", host_memory)
    monkeypatch.setattr(offload, "CHUNK", 64)
    whole = torch.arange(100, dtype=torch.float32)
    view, alone = whole[20:40].view(4, 5), torch.arange(3.0)
    want = [whole.clone(), view.clone(), alone.clone()]
    parked = Parked([whole, view, alone])
    assert asked == [64] * 6 + [16, 12]
    assert whole.untyped_storage().nbytes() == 0
    parked.restore()
    assert all(torch.equal(have, each) for have, each in zip((whole, view, alone), want, strict=True))
