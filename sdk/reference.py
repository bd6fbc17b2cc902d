"""What parallel training is compared with: one process, one plain transformers model, rows one by one."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from tensordict import TensorDict
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from core.config import OptimizerConfig
from core.loss import LossFn, LossScale, Metric
from manymesh.parts.schedule import lr_factor

OPTIMIZER = OptimizerConfig(lr=1e-2, weight_decay=0.1, max_grad_norm=1.0)
UNEQUAL = (40, 2, 17, 3, 25, 1, 9, 5)
TEMPERATURE = 0.7  # of the policy that is trained
BOTH = frozenset({"log_probs", "entropy"})


class PolicyLoss:
    """Advantage-weighted log-probabilities with an entropy bonus: both outputs carry gradient."""

    needs = BOTH

    def __call__(
        self, outputs: Mapping[str, torch.Tensor], batch: TensorDict, scale: LossScale
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        weight = batch["response_mask"] * batch["row_weight"][:, None]
        terms = batch["advantages"] * outputs["log_probs"] + 0.1 * outputs["entropy"]
        share = -(terms * weight).sum() / scale.num_tokens
        return share, {"loss": Metric(share.item(), 1.0, "sum")}


def make_batch(lengths: Sequence[int] = UNEQUAL, *, seed: int = 0, advantage: float = 0.0) -> TensorDict:
    """Padded rows of the given lengths; what padding holds is noise, which must not matter.

    Args:
        advantage: the mean. At 0 the loss cancels to nearly nothing, and its relative error says little.
    """
    generator = torch.Generator().manual_seed(seed)
    rows, width = len(lengths), max(lengths)
    mask = torch.arange(width)[None] < torch.tensor(lengths)[:, None]
    return TensorDict(
        {
            "input_ids": torch.randint(3, 64, (rows, width), generator=generator),
            "attention_mask": mask,
            "response_mask": mask & (torch.arange(width) > 0)[None],
            "advantages": torch.randn(rows, width, generator=generator) + advantage,
            "row_weight": torch.ones(rows),
        },
        batch_size=[rows],
    )


def scale_of(batch: TensorDict) -> LossScale:
    return LossScale(float((batch["response_mask"] * batch["row_weight"][:, None]).sum()), float(len(batch)))


class DistillationLoss:
    """Forward KL from a teacher's candidates to the model, over the candidates alone."""

    needs = frozenset({"top_log_probs"})
    reads = frozenset({"teacher_ids", "teacher_log_probs"})

    def __call__(
        self, outputs: Mapping[str, torch.Tensor], batch: TensorDict, scale: LossScale
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        teacher, weight = batch["teacher_log_probs"], batch["response_mask"] * batch["row_weight"][:, None]
        terms = (teacher.exp() * (teacher - outputs["top_log_probs"])).sum(-1)
        share = (terms * weight).sum() / scale.num_tokens
        return share, {"loss": Metric(share.item(), 1.0, "sum")}


def with_teacher(batch: TensorDict, num_ids: int = 3, seed: int = 0) -> TensorDict:
    """The padded batch with `teacher_ids` and `teacher_log_probs`, (rows, width, num_ids)."""
    generator = torch.Generator().manual_seed(seed)
    shape = (*batch["input_ids"].shape, num_ids)
    ids = torch.randint(3, 64, shape, generator=generator)
    return batch.copy().update(
        {"teacher_ids": ids, "teacher_log_probs": torch.randn(shape, generator=generator).log_softmax(-1)}
    )


class ValueLoss:
    """Squared distance of a value model from `advantages`, taken as returns."""

    needs = frozenset({"values"})

    def __call__(
        self, outputs: Mapping[str, torch.Tensor], batch: TensorDict, scale: LossScale
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        weight = batch["response_mask"] * batch["row_weight"][:, None]
        share = ((outputs["values"] - batch["advantages"]).square() * weight).sum() / scale.num_tokens
        return share, {"loss": Metric(share.item(), 1.0, "sum")}


class PlainTrainer:
    """One process, one transformers model, rows one by one, log_softmax over the vocabulary, torch's own clipping.

    Args:
        value_model: read the directory as a model of one label a token, and train it with ValueLoss.
    """

    def __init__(
        self,
        model: str,
        config: OptimizerConfig = OPTIMIZER,
        dtype: torch.dtype = torch.float32,
        *,
        value_model: bool = False,
    ) -> None:
        self._value_model = value_model
        kind = AutoModelForTokenClassification if value_model else AutoModelForCausalLM
        self.model = kind.from_pretrained(model, dtype=dtype)
        parameters = list(self.model.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
        self._config = config
        self._optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, partial(lr_factor, config))

    def outputs(self, batch: TensorDict, temperature: float = TEMPERATURE) -> dict[str, torch.Tensor]:
        ids, mask = batch["input_ids"], batch["attention_mask"]
        names = ValueLoss.needs if self._value_model else BOTH
        out = {name: torch.zeros(ids.shape) for name in names}
        teacher_ids = batch.get("teacher_ids", None)
        if teacher_ids is not None:
            out["top_log_probs"] = torch.zeros(teacher_ids.shape)
        for row, length in enumerate(mask.sum(1).tolist()):
            logits = self.model(input_ids=ids[row : row + 1, :length]).logits[0, :-1].float()
            if self._value_model:
                out["values"][row, 1:length] = logits[:, 0]
                continue
            logits = logits / temperature
            log_softmax = logits.log_softmax(-1)
            picked = log_softmax.gather(-1, ids[row, 1:length, None]).squeeze(-1)
            out["log_probs"][row, 1:length] = picked
            if teacher_ids is not None:
                out["top_log_probs"][row, 1:length] = log_softmax.gather(-1, teacher_ids[row, 1:length])
            out["entropy"][row, 1:length] = -(log_softmax.exp() * log_softmax).sum(-1)
        return out

    def step(self, batch: TensorDict, loss_fn: LossFn | None = None) -> tuple[float, float]:
        self._optimizer.zero_grad()
        loss_fn = loss_fn or (ValueLoss() if self._value_model else PolicyLoss())
        loss, _ = loss_fn(self.outputs(batch), batch, scale_of(batch))
        loss.backward()
        limit = self._config.max_grad_norm or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        self._optimizer.step()
        self._schedule.step()
        return loss.item(), norm.item()

    def weights(self) -> dict[str, torch.Tensor]:
        """By the names and in the form that save_pretrained writes."""
        with tempfile.TemporaryDirectory() as directory:
            self.model.save_pretrained(directory)
            return load_file(Path(directory, "model.safetensors"))


def movement_error(
    have: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor], start: Mapping[str, torch.Tensor]
) -> float:
    """Norm of the error over the norm of what training moved."""
    error = sum((have[name].double() - want[name].double()).square().sum() for name in want)
    movement = sum((want[name].double() - start[name].double()).square().sum() for name in want)
    return float((error / movement) ** 0.5)
