"""One pass of micro-batches through megatron's pipeline schedule, with the loss inside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from tensordict import TensorDict

from core.engine import MicroResult
from core.errors import Refused
from core.loss import LossFn, LossScale, Metric
from core.manifest import Limits
from manymesh.parts.log_probs import named_outputs, vocab_log_probs
from manymesh.parts.micro_batches import check_loss
from manymesh_megatron.model_input import ModelInput


def check_shapes(limits: Limits, micro_batches: Sequence[TensorDict]) -> None:
    """Raises Refused: a number or widths that the schedule cannot run."""
    number, width = limits.micro_batch_multiple, limits.sequence_multiple
    widths = [int(batch["input_ids"].shape[1]) for batch in micro_batches]
    if not widths or len(widths) % number or any(each % width for each in widths):
        raise Refused(
            "the engine cannot run micro-batches of this number or these widths",
            have=f"{len(widths)} of {sorted(set(widths))} tokens",
            want=f"a positive multiple of {number} micro-batches, padded to a multiple of {width} tokens",
            mend="honour the engine's limits, as core.batch.to_padded(multiple=...) does",
        )


def common_shapes(micro_batches: Sequence[TensorDict], device: torch.device) -> list[tuple[int, int]]:
    """Collective: rows and tokens that hold each micro-batch on all ranks, where experts gather all ranks' tokens."""
    shapes = torch.tensor([batch["input_ids"].shape for batch in micro_batches], device=device)
    dist.all_reduce(shapes, op=dist.ReduceOp.MAX)
    return [(rows, tokens) for rows, tokens in shapes.tolist()]


@attrs.frozen
class Step:
    """A forward, or a forward and backward, over micro-batches.

    Attributes:
        models: this rank's stages, in virtual order.
        outputs: to keep, in a forward pass.
        needs: to compute: these, and what the loss needs.
        vocab_size: without padding.
        multiple: of the number of packed tokens.
        shapes: of each micro-batch, at least, where all ranks must run one shape.
    """

    models: Sequence[Any]
    micro_batches: Sequence[TensorDict]
    loss_fn: LossFn | None
    scale: LossScale
    temperature: float
    forward_only: bool
    outputs: frozenset[str]
    needs: frozenset[str]
    limits: Limits
    vocab_size: int
    device: torch.device
    multiple: int
    shapes: Sequence[tuple[int, int]] | None

    def run(self) -> list[MicroResult]:
        """Results in the micro-batches' order; on the last stage only."""
        rows, width = self.micro_batches[0]["input_ids"].shape
        iterators = [iter(enumerate(self.micro_batches)) for _ in self.models]
        with torch.set_grad_enabled(not self.forward_only):
            results: list[MicroResult] = get_forward_backward_func()(
                forward_step_func=self._forward,
                data_iterator=iterators if len(iterators) > 1 else iterators[0],
                model=list(self.models) if len(self.models) > 1 else self.models[0],
                num_microbatches=len(self.micro_batches),
                # Where stages tell each other the shapes, these two are not read.
                seq_length=width,
                micro_batch_size=rows,
                forward_only=self.forward_only,
            )
        return results

    def _forward(self, batches: Iterator[tuple[int, TensorDict]], model: Any) -> tuple[torch.Tensor, Any]:
        number, batch = next(batches)
        if batch["input_ids"].device != self.device:
            # Stages between the first and the last need no more than the rows' shapes.
            last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
            batch = (batch if last else batch.select("input_ids", "attention_mask")).to(self.device)
        cp = parallel_state.get_context_parallel_group()
        shape = self.shapes[number] if self.shapes else None
        teacher_ids = batch.get("teacher_ids", None) if "top_log_probs" in self.needs else None
        inputs = ModelInput.of(
            batch, cp, packed=self.limits.packed, multiple=self.multiple, shape=shape, teacher_ids=teacher_ids
        )
        output = model(inputs.ids, inputs.positions, None, packed_seq_params=inputs.packed)
        return output, lambda output: self._loss(output, inputs, batch)

    def _loss(
        self, output: torch.Tensor, inputs: ModelInput, batch: TensorDict
    ) -> tuple[torch.Tensor, torch.Tensor, MicroResult]:
        """(share of the loss, nothing for megatron to divide by, what the engine returns)."""
        values = self._outputs(output, inputs)
        share = output.new_zeros((), dtype=torch.float32)
        metrics: Mapping[str, Metric] = {}
        if self.loss_fn is not None:
            share, metrics = self.loss_fn({name: values[name] for name in self.loss_fn.needs}, batch, self.scale)
            if not self.forward_only:
                check_loss(share, self.loss_fn, where="MegatronEngine.forward_backward")
        columns = {name: values[name] for name in self.outputs} if self.forward_only else {}
        result = MicroResult(TensorDict(columns, batch.batch_size) if columns else None, metrics)
        return share, torch.zeros((), dtype=torch.int, device=output.device), result

    def _outputs(self, output: torch.Tensor, inputs: ModelInput) -> dict[str, torch.Tensor]:
        """What the pass needs, whole (rows, tokens) or (rows, tokens, k) fp32 on every rank of the last stage.

        Args:
            output: (rows, tokens / cp, vocabulary / tp), or (rows, tokens / cp, 1) of a value model.
        """
        if not self.needs:
            return {}
        if "values" in self.needs:
            return {"values": inputs.align(output.squeeze(-1).float())}
        log_probs, entropy = vocab_log_probs(
            output.flatten(0, 1),
            inputs.targets.flatten(0, 1),
            self.temperature,
            "entropy" in self.needs,
            parallel_state.get_tensor_model_parallel_group(),
            self.vocab_size,
        )
        values = named_outputs(log_probs.view(inputs.targets.shape), entropy)
        return {name: inputs.align(value) for name, value in values.items()}
