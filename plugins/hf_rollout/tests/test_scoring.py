"""Scoring by transformers: logits of a step stay within their bound, and steps change no number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from core.batch import jagged
from manymesh_hf.scoring import score
from sdk.testing import tiny_model

LENGTHS = (1, 40, 3, 200, 5, 17)
VOCABULARY = 64


@pytest.mark.parametrize("tokens_a_step", [1, 7, 50, 600])
@torch.no_grad()
def test_rows_are_scored_alike_in_steps_of_any_size_which_logits_never_exceed(
    tmp_path: Path, tokens_a_step: int
) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(
        tiny_model(tmp_path / "model", initializer_range=0.3), dtype=torch.float32
    ).eval()
    random = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, VOCABULARY, (length,), generator=random) for length in LENGTHS]
    sizes: list[int] = []
    hook = model.register_forward_hook(lambda module, args, output: sizes.append(output.logits.numel()))
    log_probs, top_ids, top_log_probs = score(
        model, jagged(rows), VOCABULARY, 0.7, 3, elements=tokens_a_step * VOCABULARY
    )
    hook.remove()
    assert max(sizes) <= tokens_a_step * VOCABULARY
    at = 0
    for row in rows:
        table = (model(row[None]).logits[0, :-1] / 0.7).log_softmax(-1)
        mine = slice(at + 1, at + len(row))
        torch.testing.assert_close(log_probs[mine], table.gather(1, row[1:, None])[:, 0], atol=1e-4, rtol=0)
        torch.testing.assert_close(top_log_probs[mine], table.topk(3).values, atol=1e-4, rtol=0)
        torch.testing.assert_close(table.gather(1, top_ids[mine]), top_log_probs[mine], atol=1e-4, rtol=0)
        assert not log_probs[at]
        at += len(row)
