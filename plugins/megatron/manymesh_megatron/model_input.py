"""A micro-batch in the form that megatron's stages run: padded or packed, and cut for context parallel; and back."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from tensordict import TensorDict
from torch.nn import functional as F

from manymesh.parts.log_probs import predicted_ids, unpacked, without_padding
from manymesh_megatron.modules import from_zigzag, zigzag


@attrs.frozen
class ModelInput:
    """One micro-batch on one rank.

    Attributes:
        ids: (rows, tokens / cp), or (1, all tokens) when packed.
        targets: of the ids' shape and 1 + k; the id that each position predicts, and k others that a teacher gave. What
            a row's last position predicts is nobody's.
        positions: of the ids' shape, from the row's beginning.
        packed: megatron's description of the rows' borders, None when padded.
        mask: (rows, tokens) bool, the real tokens.
    """

    ids: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor
    packed: PackedSeqParams | None
    mask: torch.Tensor
    cp: Any = attrs.field(repr=False)

    @classmethod
    def of(
        cls,
        batch: TensorDict,
        cp: Any,
        *,
        packed: bool,
        multiple: int,
        shape: tuple[int, int] | None = None,
        teacher_ids: torch.Tensor | None = None,
    ) -> ModelInput:
        """From a padded micro-batch.

        Args:
            cp: the context-parallel process group.
            multiple: of the number of packed tokens (tp under sequence parallel).
            shape: padded up to it, where all ranks must run one shape.
            teacher_ids: (rows, tokens, k), where the log-probs of those ids are asked for.
        """
        ids, mask = batch["input_ids"], batch["attention_mask"].bool()
        if shape is not None:
            more_rows, more_tokens = shape[0] - ids.shape[0], shape[1] - ids.shape[1]
            ids = F.pad(ids, (0, more_tokens, 0, more_rows))
            if teacher_ids is not None:
                teacher_ids = F.pad(teacher_ids, (0, 0, 0, more_tokens, 0, more_rows))
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        targets = predicted_ids(ids, teacher_ids)
        if packed:
            return cls._pack(ids, targets, positions, mask, cp, multiple)
        if cp.size() > 1:
            ids, targets, positions = (_mine(each, cp) for each in (ids, targets, positions))
        return cls(ids, targets, positions, None, mask, cp)

    @classmethod
    def _pack(
        cls,
        ids: torch.Tensor,
        targets: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
        cp: Any,
        multiple: int,
    ) -> ModelInput:
        lengths = mask.sum(1)
        lengths = lengths[lengths > 0]
        total = int(lengths.sum())
        extra = max(-total % multiple, 0 if total else multiple)
        if extra:  # a row of its own, which nobody reads
            lengths = torch.cat((lengths, lengths.new_tensor([extra])))
        borders = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        longest = int(lengths.max())
        params = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=borders, cu_seqlens_kv=borders, max_seqlen_q=longest, max_seqlen_kv=longest
        )
        flat = [F.pad(each[mask], (*[0, 0] * (each.ndim - 2), 0, extra))[None] for each in (ids, targets, positions)]
        return cls(flat[0], flat[1], flat[2], params, mask, cp)

    def align(self, predictions: torch.Tensor) -> torch.Tensor:
        """What positions predict, of the ids' shape or with k more, to (rows, tokens[, k]): value t belongs to token t.

        0 at position 0 and in padding. Context-parallel ranks get the whole rows; the gradient goes back to each rank's
        own part, once, since all of them go on alike.
        """
        if self.packed is not None:
            whole = unpacked(predictions[0], self.mask)
        elif self.cp.size() > 1:
            whole = _whole(predictions, self.cp)
        else:
            whole = predictions
        rows, tokens = self.mask.shape
        next_tokens = F.pad(whole[:rows, : tokens - 1], (*[0, 0] * (whole.ndim - 2), 1, 0))
        return without_padding(next_tokens, self.mask)


def _mine(rows: torch.Tensor, cp: Any) -> torch.Tensor:
    chunks = rows.chunk(2 * cp.size(), 1)
    return torch.cat([chunks[i] for i in zigzag(cp.rank(), cp.size())], 1)


def _whole(part: torch.Tensor, cp: Any) -> torch.Tensor:
    parts = gather_from_sequence_parallel_region(
        part.transpose(0, 1).contiguous(), tensor_parallel_output_grad=False, group=cp
    )
    chunks = parts.chunk(2 * cp.size())
    return torch.cat([chunks[i] for i in from_zigzag(cp.size())]).transpose(0, 1)
