"""Rows of a rollout: the prompts that a batch holds, and the contract's jagged columns that come back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs
import torch
from tensordict import TensorDict

from core.batch import contiguous, is_jagged, nested, num_rows, object_column, with_metadata
from core.errors import Refused


@attrs.frozen
class Prompts:
    """Prompts of a batch, without padding.

    Attributes:
        tokens: int64 (tokens), in row order.
        lengths: int64 (rows), each at least 1.
        prompt_id: int64 (rows): the batch's own, else the row's number.
        row_weight: fp32 (rows): the batch's own, else ones.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    prompt_id: torch.Tensor
    row_weight: torch.Tensor

    def __len__(self) -> int:
        return len(self.lengths)

    @classmethod
    def read(cls, batch: TensorDict) -> Prompts:
        """From `prompt_ids`: jagged, or padded on either side with `attention_mask`, or all of one length.

        Raises:
            Refused: there is no such column, it has another form, or a prompt is empty.
        """
        ids = batch.get("prompt_ids", None)
        if ids is None:
            raise Refused(
                "the batch has no prompts", have=sorted(batch.keys()), want="a column prompt_ids (rows, tokens)"
            )
        rows = num_rows(batch)
        if is_jagged(ids):
            ids = contiguous(ids)
            tokens, lengths = ids.values(), ids.offsets().diff()
        else:
            mask = batch.get("attention_mask", None)
            mask = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
            if ids.dim() != 2 or mask.shape != ids.shape:
                raise Refused(
                    "prompt_ids has another shape than its mask",
                    have=f"prompt_ids {tuple(ids.shape)}, attention_mask {tuple(mask.shape)}",
                    want="(rows, tokens) both",
                )
            tokens, lengths = ids[mask], mask.sum(1)
        if tokens.dim() != 1 or tokens.is_floating_point():
            raise Refused("prompt_ids are token ids", have=tokens.dtype, want="int64 (rows, tokens)")
        if rows and not bool(lengths.all()):
            empty = (lengths == 0).nonzero().flatten().tolist()
            raise Refused("prompts are empty", have=f"rows {empty[:20]}", want="at least one token each")
        prompt_id = batch.get("prompt_id", None)
        row_weight = batch.get("row_weight", None)
        return cls(
            tokens.long(),
            lengths,
            torch.arange(rows, device=tokens.device) if prompt_id is None else prompt_id.long(),
            torch.ones(rows, device=tokens.device) if row_weight is None else row_weight.float(),
        )

    def check(self, vocab_size: int, context: int | None, max_new_tokens: int) -> None:
        """Raises Refused where a token is not in the vocabulary, or prompt and response don't fit the context."""
        if not len(self):
            return
        low, high = int(self.tokens.min()), int(self.tokens.max())
        if low < 0 or high >= vocab_size:
            first = ((self.tokens < 0) | (self.tokens >= vocab_size)).nonzero()[0]
            row = int(torch.searchsorted(self.lengths.cumsum(0), first, right=True))
            raise Refused(
                f"prompt {row} has a token that the model doesn't know",
                have=f"ids {low}..{high}",
                want=f"0..{vocab_size - 1}",
                mend="use the model's own tokenizer",
            )
        longest = int(self.lengths.max())
        if context is not None and longest + max_new_tokens > context:
            row = int(self.lengths.argmax())
            raise Refused(
                f"prompt {row} leaves no room for its response",
                have=f"{longest} tokens and max_new_tokens {max_new_tokens}",
                want=f"at most {context} together, the model's context",
                mend=f"cut prompts to {max(context - max_new_tokens, 0)} tokens, or lower max_new_tokens",
            )

    def repeat(self, num_samples: int) -> Prompts:
        """Each prompt num_samples times, standing together."""
        copies = [row for row in self.tokens.split(self.lengths.tolist()) for _ in range(num_samples)]
        by_row = (each.repeat_interleave(num_samples, 0) for each in (self.lengths, self.prompt_id, self.row_weight))
        return Prompts(torch.cat(copies) if copies else self.tokens, *by_row)


@attrs.frozen
class Responses:
    """Rows of one generate call, without padding: flat tokens in row order, and what there is by row.

    Attributes:
        input_ids: int64 (tokens): prompt and response of each row.
        response_mask: bool (tokens).
        log_probs: fp32 (tokens), 0 on the prompt's.
        lengths: int64 (rows): tokens of prompt and response.
        finish_reasons: "stop", "length" or "abort", by row.
    """

    input_ids: torch.Tensor
    response_mask: torch.Tensor
    log_probs: torch.Tensor
    lengths: torch.Tensor
    finish_reasons: tuple[str, ...]

    @classmethod
    def behind(
        cls,
        prompts: Prompts,
        tokens: Sequence[Sequence[int]],
        log_probs: Sequence[Sequence[float]],
        finish_reasons: Iterable[str],
    ) -> Responses:
        """What was sampled behind each prompt, by row, as an engine that speaks in lists gives it. On CPU."""
        asked = prompts.lengths.cpu()
        sampled = torch.tensor([len(row) for row in tokens], dtype=torch.int64)
        lengths = asked + sampled
        ends = lengths.cumsum(0)
        at = torch.arange(int(lengths.sum()))
        mask = at >= (ends - sampled).repeat_interleave(lengths)
        input_ids = torch.empty(len(at), dtype=torch.int64)
        input_ids[~mask] = prompts.tokens.cpu()
        input_ids[mask] = torch.tensor([token for row in tokens for token in row], dtype=torch.int64)
        padded = torch.zeros(len(at))
        padded[mask] = torch.tensor([value for row in log_probs for value in row], dtype=torch.float32)
        return cls(input_ids, mask, padded, lengths, tuple(finish_reasons))

    @classmethod
    def none(cls) -> Responses:
        empty = torch.zeros(0, dtype=torch.int64)
        return cls(empty, empty.bool(), empty.float(), empty, ())

    @classmethod
    def concat(cls, parts: Iterable[Responses]) -> Responses:
        parts = list(parts)
        if len(parts) == 1:
            return parts[0]
        return cls(
            torch.cat([part.input_ids for part in parts]),
            torch.cat([part.response_mask for part in parts]),
            torch.cat([part.log_probs for part in parts]),
            torch.cat([part.lengths for part in parts]),
            tuple(reason for part in parts for reason in part.finish_reasons),
        )

    def batch(self, prompts: Prompts, *, weight_version: int, temperature: float, log_prob_kind: str) -> TensorDict:
        """The contract's columns, on the prompts' device; token columns share their offsets.

        Args:
            temperature: that the rows were sampled at; 0 (greedy) is recorded as 1, whose log-probs greedy rows have.
        """
        device, rows = prompts.tokens.device, len(self.lengths)
        out = TensorDict({}, batch_size=[rows])
        offsets = torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0)).to(device)
        tokens = {"input_ids": self.input_ids, "response_mask": self.response_mask, "rollout_log_probs": self.log_probs}
        for name, values in tokens.items():
            out.set(name, nested(values.to(device), offsets))
        out.set("prompt_id", prompts.prompt_id)
        out.set("weight_version", torch.full((rows,), weight_version, dtype=torch.int64, device=device))
        out.set("row_weight", prompts.row_weight)
        out.set("finish_reason", object_column(list(self.finish_reasons)))
        return with_metadata(out, rollout_temperature=temperature or 1.0, log_prob_kind=log_prob_kind)
