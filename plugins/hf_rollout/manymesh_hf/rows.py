"""Prompts in, left-padded for generate; responses out, as the contract's jagged columns."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import torch
from tensordict import TensorDict

from core.batch import contiguous, is_jagged, num_rows, object_column, with_metadata
from core.errors import Refused


@attrs.frozen
class Prompts:
    """Prompts of a batch, padded on the left with the row's own first token.

    Padding is masked out of attention, and being one of the row's own tokens it leaves the repetition penalty as it is.

    Attributes:
        ids: int64 (rows, width).
        lengths: int64 (rows).
        prompt_id: int64 (rows): the batch's own, else the row's number.
        row_weight: fp32 (rows): the batch's own, else ones.
    """

    ids: torch.Tensor
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
            values, lengths = ids.values(), ids.offsets().diff()
        else:
            mask = batch.get("attention_mask", None)
            mask = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
            if ids.dim() != 2 or mask.shape != ids.shape:
                raise Refused(
                    "prompt_ids has another shape than its mask",
                    have=f"prompt_ids {tuple(ids.shape)}, attention_mask {tuple(mask.shape)}",
                    want="(rows, tokens) both",
                )
            values, lengths = ids[mask], mask.sum(1)
        if values.dim() != 1 or values.is_floating_point():
            raise Refused("prompt_ids are token ids", have=values.dtype, want="int64 (rows, tokens)")
        if rows and not bool(lengths.all()):
            empty = (lengths == 0).nonzero().flatten().tolist()
            raise Refused("prompts are empty", have=f"rows {empty[:20]}", want="at least one token each")
        prompt_id = batch.get("prompt_id", None)
        row_weight = batch.get("row_weight", None)
        return cls(
            _left_pad(values.long(), lengths),
            lengths,
            torch.arange(rows, device=values.device) if prompt_id is None else prompt_id.long(),
            torch.ones(rows, device=values.device) if row_weight is None else row_weight.float(),
        )

    def check(self, vocab_size: int, context: int | None, max_new_tokens: int) -> None:
        """Raises Refused where a token is not in the vocabulary, or prompt and response don't fit the context."""
        if not len(self):
            return
        low, high = int(self.ids.min()), int(self.ids.max())
        if low < 0 or high >= vocab_size:
            row = int(((self.ids < 0) | (self.ids >= vocab_size)).any(1).nonzero()[0])
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
        return Prompts(*(getattr(self, f.name).repeat_interleave(num_samples, 0) for f in attrs.fields(Prompts)))

    def take(self, start: int, stop: int) -> Prompts:
        """Rows start..stop-1, no wider than their longest prompt."""
        lengths = self.lengths[start:stop]
        width = int(lengths.max())
        ids = self.ids[start:stop, self.ids.shape[1] - width :]
        return Prompts(ids, lengths, self.prompt_id[start:stop], self.row_weight[start:stop])

    def to(self, device: torch.device) -> Prompts:
        return Prompts(*(getattr(self, f.name).to(device) for f in attrs.fields(Prompts)))

    @property
    def mask(self) -> torch.Tensor:
        """bool (rows, width), False on padding."""
        width = self.ids.shape[1]
        return torch.arange(width, device=self.ids.device) >= width - self.lengths[:, None]


def _left_pad(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    if not len(lengths):
        return values.new_zeros(0, 0)
    width = int(lengths.max())
    mask = torch.arange(width, device=values.device) >= width - lengths[:, None]
    ids = values[lengths.cumsum(0) - lengths][:, None].repeat(1, width)
    ids[mask] = values
    return ids


@attrs.frozen
class Responses:
    """Rows of one generate call, without padding: flat tokens in row order, and what there is by row.

    Attributes:
        input_ids: int64 (tokens): prompt and response of each row.
        response_mask: bool (tokens).
        log_probs: fp32 (tokens), 0 on the prompt's.
        lengths: int64 (rows): tokens of prompt and response.
        stopped: bool (rows): a stop ended the row, not its length.
    """

    input_ids: torch.Tensor
    response_mask: torch.Tensor
    log_probs: torch.Tensor
    lengths: torch.Tensor
    stopped: torch.Tensor

    @classmethod
    def cut(cls, prompts: Prompts, sequences: torch.Tensor, log_probs: torch.Tensor, ends: torch.Tensor) -> Responses:
        """Drop the padding and what was generated after a row's end.

        Args:
            sequences: int64 (rows, width of prompts + steps).
            log_probs: fp32 (rows, steps).
            ends: int64 (rows), tokens of the response, 0 where no stop came.
        """
        rows, width = prompts.ids.shape
        steps = sequences.shape[1] - width
        stopped = ends > 0
        ends = torch.where(stopped, ends, steps)
        at = torch.arange(width + steps, device=sequences.device)
        keep = (at >= width - prompts.lengths[:, None]) & (at < width + ends[:, None])
        padded = torch.cat([log_probs.new_zeros(rows, width), log_probs[:, :steps]], dim=1)
        return cls(sequences[keep], (at >= width).expand_as(keep)[keep], padded[keep], prompts.lengths + ends, stopped)

    @classmethod
    def none(cls) -> Responses:
        empty = torch.zeros(0, dtype=torch.int64)
        return cls(empty, empty.bool(), empty.float(), empty, empty.bool())

    @classmethod
    def concat(cls, parts: Iterable[Responses]) -> Responses:
        parts = list(parts)
        if len(parts) == 1:
            return parts[0]
        return cls(*(torch.cat([getattr(part, f.name) for part in parts]) for f in attrs.fields(cls)))

    def batch(self, prompts: Prompts, *, weight_version: int, temperature: float, log_prob_kind: str) -> TensorDict:
        """The contract's columns, on the prompts' device; token columns share their offsets."""
        device, rows = prompts.ids.device, len(self.lengths)
        offsets = torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0)).to(device)
        out = TensorDict({}, batch_size=[rows])
        tokens = {"input_ids": self.input_ids, "response_mask": self.response_mask, "rollout_log_probs": self.log_probs}
        for name, values in tokens.items():
            out.set(name, torch.nested.nested_tensor_from_jagged(values.to(device), offsets))
        out.set("prompt_id", prompts.prompt_id)
        out.set("weight_version", torch.full((rows,), weight_version, dtype=torch.int64, device=device))
        out.set("row_weight", prompts.row_weight)
        out.set("finish_reason", object_column(["stop" if stop else "length" for stop in self.stopped.tolist()]))
        return with_metadata(out, temperature=temperature, log_prob_kind=log_prob_kind)
