"""The kernel that draws on GPUs, by Triton's interpreter, against the same function in torch."""

from __future__ import annotations

import os
import subprocess
import sys

CODE = """
import torch
from manymesh_sglang.draw import draw, gumbel, noise_bits, row_keys
from manymesh_sglang.draw_kernel import BLOCK, bits_of, draw_in_one_pass

generator = torch.Generator().manual_seed(0)
for vocabulary in (1, 31, BLOCK, 2 * BLOCK + 17):
    rows = 6
    keys = row_keys(torch.randint(-2**60, 2**60, (rows,), generator=generator), torch.arange(rows) * 100_003)
    bits = noise_bits(keys, vocabulary)
    assert torch.equal(bits_of(keys, vocabulary), bits), vocabulary
    for scale in (0.01, 1.0, 30.0):
        logits = scale * torch.randn(rows, vocabulary, generator=generator)
        logits[:, 3::5] = -torch.inf
        ours, theirs = draw(logits, keys), draw_in_one_pass(logits, keys)
        scores = logits + gumbel(bits)
        gap = (scores.gather(1, ours[:, None]) - scores.gather(1, theirs[:, None])).abs()
        assert float(gap.max()) < 1e-5, (vocabulary, scale)
        assert scale < 1 or torch.equal(ours, theirs) or float(gap[ours != theirs].max()) < 1e-5
broken = torch.zeros(2, 50)
broken[1, 20] = torch.nan
assert draw_in_one_pass(broken, row_keys(torch.tensor([1, 2]), torch.tensor([0, 0])))[1] == 20
assert len(draw_in_one_pass(broken[:0], torch.zeros(0, dtype=torch.int64))) == 0
print("equal")
"""


def test_the_kernel_has_the_bits_of_torch_and_draws_its_tokens() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "equal", done.stderr[-3000:]
