"""One stream of randomness a row: a function of (seed, prompt_id, sample) alone, whatever the batch or the ranks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

Bits = npt.NDArray[np.uint64]


def row_keys(seed: int, prompt_id: torch.Tensor, sample: torch.Tensor) -> Bits:
    """64 random bits a row.

    SplitMix64 (Steele, Lea, Flood 2014): a counter through a mixing function, so all rows are made in one go.

    Args:
        seed: any integer; taken modulo 2**64.
        prompt_id, sample: int64 (rows), on CPU: sample j of the prompt i.
    """
    key = mix(np.array([seed % 2**64], dtype=np.uint64))
    key = mix(key + prompt_id.numpy().view(np.uint64))
    return mix(key + sample.numpy().view(np.uint64))


def mix(x: Bits) -> Bits:
    """SplitMix64's finalizer, a bijection of 64-bit integers."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
