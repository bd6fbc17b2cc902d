"""TrainingWorker: any engine of the registry as a remote API of batches."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from pkgutil import resolve_name
from typing import Any, Literal

import attrs
import torch
import torch.distributed as dist
from tensordict import TensorDict, TensorDictBase

from core.batch import flat, nested, num_rows, row_groups, row_lengths, take, to_jagged, to_padded
from core.config import structure
from core.device import choose_device
from core.dispatch import Dispatch, on_mesh, register
from core.engine import OPTIONAL, Engine, MicroResult
from core.errors import ConfigError, Refused
from core.loss import LossFn, LossScale, LossSpec, Metric
from core.manifest import Capability
from core.registry import Choice, EngineRegistry
from core.worker import Shard, Worker
from manymesh.parts.agreement import agree
from manymesh.parts.device_memory import empty_caches
from manymesh.parts.log_probs import unpacked
from manymesh.workers.export import export_directory
from manymesh.workers.micro_batch import MicroBatchConfig, plan_micro_batches, round_up, widen
from manymesh.workers.temperature import check_temperature


@attrs.frozen
class TrainingWorkerConfig:
    """A training engine and how to feed it.

    Attributes:
        backend: name in the registry.
        engine: the backend's options, structured into its manifest's class.
        model_type: "language_model" or "value_model".
        loss: for training; can be set later.
        device: torch device type; None for what the machine has.
        choice: the backend as the driver found it (`EngineRegistry.get(name).choice`): a worker that has another
            distribution or version, or none, refuses. None: what the worker has.
    """

    backend: str = "fsdp"
    engine: Mapping[str, Any] = attrs.field(factory=dict)
    model_type: str = "language_model"
    micro_batch: MicroBatchConfig = attrs.field(factory=MicroBatchConfig)
    loss: LossSpec | None = None
    device: str | None = None
    choice: Choice | None = None


class TrainingWorker(Worker):
    """One engine on one rank, with mesh "train".

    Batches have the columns of core.columns, jagged or padded with `attention_mask`; answers come in the form of the
    batch. Mini-batches are cut from the global batch's rows before these are dealt to dp ranks, so that the dp size
    never changes which rows make an optimizer step.
    """

    def __init__(self, config: TrainingWorkerConfig | Mapping[str, Any]) -> None:
        self.config = structure(TrainingWorkerConfig, config, "training worker")
        self.init_process_group()
        options = self.config
        self.engine: Engine = EngineRegistry.new(
            options.model_type, options.backend, options.engine, options.device, expect=options.choice
        )
        self.add_mesh("train", self.engine.mesh)
        self._loss_fn: LossFn | None = None
        if self.config.loss is not None:
            self.set_loss_fn(self.config.loss)

    @register()
    def reset(self) -> None:
        """Build the engine's model and optimizer from its config."""
        self.engine.initialize()
        self._leave_room()

    @register()
    def set_loss_fn(self, loss: LossSpec | LossFn) -> None:
        """Use this loss from now on. A callable only where driver and workers share an environment."""
        self._loss_fn = _load_loss(loss) if isinstance(loss, LossSpec) else loss

    @register(on_mesh("train"), deal_by="tokens", reads_only=True)
    def infer_batch(
        self,
        batch: TensorDict,
        outputs: tuple[str, ...] = ("log_probs",),
        with_loss: bool = False,
        temperature: float = 1.0,
    ) -> tuple[TensorDict | None, dict[str, Metric]] | None:
        """Forward only.

        Args:
            outputs: model outputs to return as columns, token-aligned.
            with_loss: also evaluate the loss, normalised over the whole batch.
            temperature: of the policy: log-probs and entropy are of softmax(logits / temperature).

        Returns:
            (batch of the outputs, or None when none was asked for; metrics of the loss).

        Raises:
            Refused: an output that the engine doesn't have, no rows, or rows that were sampled at another temperature.
        """
        loss_fn = _WithLoss(self._need_loss()) if with_loss else None
        unknown = set(outputs) - self.engine.limits.outputs
        if unknown:
            raise Refused(
                f"backend {self.config.backend!r} has no output {sorted(unknown)}",
                want=sorted(self.engine.limits.outputs),
            )
        if not len(batch):
            raise Refused("an empty batch cannot be run")
        needs = loss_fn.needs if loss_fn is not None else frozenset()
        check_temperature(batch, temperature, needs | set(outputs))
        (step,) = self._plan([batch])
        with self.engine.eval_mode(), torch.no_grad():
            results = self.engine.forward_backward(
                step.micro_batches,
                loss_fn,
                step.scale,
                temperature=temperature,
                forward_only=True,
                outputs=frozenset(outputs),
            )
        self._leave_room()
        if results is None:  # not the last pipeline stage: somebody else answers
            return None
        return step.gather(batch, results, outputs), Metric.join_all([dict(r.metrics) for r in results])

    @register(on_mesh("train"), deal_by="tokens", reads_only=True)
    def train_batch(self, batch: TensorDict, temperature: float = 1.0) -> dict[str, Metric]:
        """One optimizer step on the whole batch. See train_mini_batch."""
        return self.train_mini_batch(batch, temperature=temperature)

    @register(on_mesh("train"), num_blocks="num_mini_batches", deal_by="tokens", reads_only=True)
    def train_mini_batch(
        self, batch: TensorDict, num_mini_batches: int = 1, epochs: int = 1, temperature: float = 1.0
    ) -> dict[str, Metric]:
        """Epochs over mini-batches, one optimizer step a mini-batch.

        Args:
            batch: with `response_mask`; `row_weight` is 1 where absent.
            temperature: of the policy: the loss's log-probs and entropy are of softmax(logits / temperature).

        Returns:
            the loss's metrics over all steps; "loss", "grad_norm" and "lr" as means over steps; "num_tokens" that the
            loss counted; "skipped_steps" whose gradients were not finite.

        Raises:
            Refused: there is no loss, the batch lacks what it reads, the rows don't make equal mini-batches, or were
                sampled at another temperature.
        """
        loss_fn = self._need_loss()
        check_temperature(batch, temperature, loss_fn.needs)
        missing = sorted(getattr(loss_fn, "reads", frozenset()) - set(batch.keys()))
        if missing:
            raise Refused(
                f"the batch lacks columns that the loss reads: {', '.join(missing)}", have=sorted(batch.keys())
            )
        sizes = _mini_batches(num_rows(batch), num_mini_batches, self.shard)
        if epochs < 1:
            raise Refused("training goes over its rows at least once", have=f"{epochs} epochs")
        ends = list(accumulate(sizes))
        ranges = [(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        steps = self._plan([take(batch, [each]) for each in ranges] if len(ranges) > 1 else [batch])
        parts: list[dict[str, Metric]] = []
        with self.engine.train_mode():
            for _ in range(epochs):
                parts += [self._train_step(step, loss_fn, temperature) for step in steps]
        self._leave_room()
        return _join_steps(parts)

    @register()
    def to(
        self, device: Literal["cpu", "device"], model: bool = True, optimizer: bool = True, grad: bool = True
    ) -> None:
        """Move the engine's state between the CPU and its device."""
        self._require(Capability.OFFLOAD).to(device, model=model, optimizer=optimizer, grad=grad)

    @register()
    def save_checkpoint(self, path: str, step: int = 0) -> None:
        """Write a checkpoint. Refused on all ranks when one cannot write; then nothing is left at `path`."""
        self._require(Capability.CHECKPOINT).save_checkpoint(path, step=step)

    @register(Dispatch.SAME_ON_ALL)
    def load_checkpoint(self, path: str) -> int:
        """Read a checkpoint, also of another world size; gives its step. Refused, with nothing changed, when it is of
        another model."""
        step: int = self._require(Capability.CHECKPOINT).load_checkpoint(path)
        return step

    @register()
    def settle_checkpoint(self) -> None:
        """Wait until the checkpoints that were saved are whole, under their names: engines may write in the background.
        Refused on all ranks where one could not be written."""
        self._require(Capability.CHECKPOINT).settle_checkpoint()

    @register()
    def export_model(self, path: str) -> None:
        """Write the weights as a Hugging Face directory, with the config and tokenizer that the engine's model had.

        Raises:
            Refused: on all ranks, where it could not be written; then `path` is not there.
        """
        model = self.config.engine.get("model", "")
        with self.engine.eval_mode():
            export_directory(self.engine.export_weights(dst="first"), model, path, writes=self.rank == 0)

    def shutdown(self) -> None:
        self.engine.shutdown()

    def _leave_room(self) -> None:
        """For other groups' processes on the same device. A rollout in this process makes its own room."""
        given = self.context.accelerators
        if given is not None and given.are_shared:
            empty_caches(choose_device(self.config.device))

    def _require(self, capability: Capability) -> Any:
        """The engine, which meets the protocol of a capability, or Refused."""
        if not isinstance(self.engine, OPTIONAL[capability]):
            raise Refused(
                f"backend {self.config.backend!r} doesn't offer {capability.value!r}",
                mend=f"see `python -m core.list_engines {self.config.backend}` for what it offers",
            )
        return self.engine

    def _need_loss(self) -> LossFn:
        if self._loss_fn is None:
            raise Refused("the worker has no loss", mend="set `loss` in its config or call set_loss_fn")
        return self._loss_fn

    def _train_step(self, step: _Step, loss_fn: LossFn, temperature: float) -> dict[str, Metric]:
        self.engine.optimizer_zero_grad()
        results = self.engine.forward_backward(
            step.micro_batches, _WithLoss(loss_fn), step.scale, temperature=temperature
        )
        info = self.engine.optimizer_step()
        lr = self.engine.lr_scheduler_step()
        metrics = Metric.join_all([dict(result.metrics) for result in results or ()])
        metrics["grad_norm"] = Metric(info.grad_norm)
        metrics["lr"] = Metric(lr)
        metrics["num_tokens"] = Metric(step.scale.num_tokens, how="same")
        metrics["skipped_steps"] = Metric(float(info.skipped), how="same")
        return metrics

    def _plan(self, batches: list[TensorDict]) -> list[_Step]:
        """One step for each batch, with denominators and numbers of micro-batches that all ranks agree on."""
        limits, config = self.engine.limits, self.config.micro_batch
        multiple = limits.micro_batch_multiple
        rows = [to_jagged(batch) if "attention_mask" in batch.keys() else batch for batch in batches]  # noqa: SIM118
        lengths = [row_lengths(each).tolist() for each in rows]
        groups = [row_groups(each) for each in rows]
        packed, width = limits.packed, limits.sequence_multiple
        plans: list[list[list[int]]] = [[] for _ in batches]
        refusal: Refused | None = None
        try:
            _check_groups_whole(groups)
            plans = [
                plan_micro_batches(tokens, config, packed=packed, sequence_multiple=width, groups=members)
                for tokens, members in zip(lengths, groups, strict=True)
            ]
        except Refused as error:  # the other ranks must refuse as well, and so does this one below
            refusal = error
        # Ranks of one dp shard hold the same rows: only the collected one counts them.
        mine = [
            [*(_denominators(each) if self.engine.mesh.is_collect else (0.0, 0.0)), round_up(len(part), multiple)]
            for each, part in zip(rows, plans, strict=True)
        ]
        totals_of_ranks = torch.tensor(mine, dtype=torch.float64)[None]
        if self.world_size > 1:
            everyone = [torch.empty_like(totals_of_ranks) for _ in range(self.world_size)]
            dist.all_gather(everyone, totals_of_ranks)
            totals_of_ranks = torch.cat(everyone)
        totals, counts = totals_of_ranks[..., :2].sum(0), totals_of_ranks[..., 2].amax(0)
        if not totals_of_ranks[..., 2].all():  # some rank has no plan
            agree(None, refusal)
        return [
            _Step.of(
                rows[i],
                widen(plans[i], lengths[i], int(counts[i]), groups[i]),
                next(iter((groups[i] or {0: [0]}).values())),
                LossScale(*totals[i].tolist()),
                width,
            )
            for i in range(len(batches))
        ]


@attrs.frozen
class _Step:
    """A rank's share of one optimizer step, cut into micro-batches."""

    micro_batches: list[TensorDict]
    plan: list[list[int]]
    scale: LossScale

    @classmethod
    def of(cls, rows: TensorDict, plan: list[list[int]], filler: list[int], scale: LossScale, multiple: int) -> _Step:
        """`filler`: rows, a whole group where there are groups, that an empty micro-batch gets, with weight zero."""

        def micro_batch(part: list[int]) -> TensorDict:
            padded = to_padded(rows, rows=torch.tensor(part or filler), multiple=multiple)
            if not part:
                padded["row_weight"] = torch.zeros(len(filler))
            return padded

        return cls([micro_batch(part) for part in plan], plan, scale)

    def gather(self, batch: TensorDictBase, results: list[MicroResult], outputs: tuple[str, ...]) -> TensorDict | None:
        """The outputs of all micro-batches in the order and form of `batch`."""
        if not outputs:
            return None
        lengths = row_lengths(batch)
        starts = lengths.cumsum(0) - lengths
        first = results[0].outputs
        widths = {name: first[name].shape[2:] if first is not None else () for name in outputs}
        tokens = {name: torch.zeros(int(lengths.sum()), *width) for name, width in widths.items()}
        for part, micro_batch, result in zip(self.plan, self.micro_batches, results, strict=True):
            if part and result.outputs is not None:
                mask = micro_batch["attention_mask"].bool()
                at = (starts[torch.tensor(part)][:, None] + torch.arange(mask.shape[1]))[mask]
                for name in outputs:
                    tokens[name][at] = result.outputs[name].cpu()[mask].to(tokens[name].dtype)
        mask = batch.get("attention_mask", None)
        if mask is not None:
            mask = mask.bool()
            padded = {name: unpacked(values, mask) for name, values in tokens.items()}
            return TensorDict(padded, batch_size=batch.batch_size)
        # The very offsets of the batch's tokens, so that the two can be computed with together.
        offsets = flat(batch.get("input_ids"))[1]
        out = TensorDict({}, batch_size=batch.batch_size)
        for name, values in tokens.items():
            out.set(name, nested(values, offsets))
        return out


def _load_loss(spec: LossSpec) -> LossFn:
    try:
        loss: LossFn = resolve_name(spec.factory)(**spec.options)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ConfigError(
            f"the loss {spec.factory!r} cannot be made",
            have=f"{type(error).__name__}: {error}; options {dict(spec.options)}",
            want="'module:factory' and the factory's own options",
        ) from error
    return loss


def _mini_batches(rows: int, num_mini_batches: int, shard: Shard | None) -> tuple[int, ...]:
    """Rows of each mini-batch on this rank: as they were dealt, or equal ones where nobody dealt them.

    Raises:
        Refused: the rows don't divide.
    """
    if shard is not None and len(shard.blocks) == num_mini_batches and sum(shard.sizes) == rows:
        return shard.sizes
    if num_mini_batches < 1 or rows % num_mini_batches or not rows:
        raise Refused(
            "a batch is cut into equal mini-batches", have=f"{rows} rows on this rank, {num_mini_batches} mini-batches"
        )
    return (rows // num_mini_batches,) * num_mini_batches


def _check_groups_whole(mini_batches: list[dict[int, list[int]] | None]) -> None:
    """Raises Refused where rows of one group are in several mini-batches."""
    earlier: set[int] = set()
    for groups in mini_batches:
        if common := earlier.intersection(groups or ()):
            raise Refused(
                "rows that belong together are in different mini-batches",
                have=f"group_id {sorted(common)[:5]}",
                mend="call the method through a worker group, which keeps groups whole, or order the rows by group",
            )
        earlier.update(groups or ())


class _WithLoss:
    """A loss whose metrics also hold the loss itself."""

    def __init__(self, loss_fn: LossFn) -> None:
        self._loss_fn, self.needs = loss_fn, loss_fn.needs

    def __call__(
        self, outputs: Mapping[str, torch.Tensor], batch: TensorDict, scale: LossScale
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        loss, metrics = self._loss_fn(outputs, batch, scale)
        return loss, {"loss": Metric(float(loss.detach()), how="sum"), **metrics}


def _denominators(rows: TensorDict) -> tuple[float, float]:
    """(response tokens, rows), weighted by row_weight."""
    weight = rows.get("row_weight", None)
    weight = torch.ones(num_rows(rows)) if weight is None else weight
    mask = rows.get("response_mask", None)
    if mask is None:
        return 0.0, float(weight.sum())
    per_token = torch.repeat_interleave(weight, row_lengths(rows))
    return float((flat(mask)[0] * per_token).sum()), float(weight.sum())


def _join_steps(steps: list[dict[str, Metric]]) -> dict[str, Metric]:
    """Over optimizer steps sums become means: a loss is a sum over micro-batches and ranks, and a mean over steps."""
    result: dict[str, Metric] = {}
    for name in dict.fromkeys(name for step in steps for name in step):
        values = [step[name] for step in steps if name in step]
        if values[0].how in ("sum", "same") and name not in ("num_tokens", "skipped_steps"):
            result[name] = Metric(sum(metric.total for metric in values) / len(values), how=values[0].how)
        elif values[0].how == "same":
            result[name] = Metric(sum(metric.total for metric in values), how="same")
        else:
            result[name] = Metric.join(values, name)
    return result
