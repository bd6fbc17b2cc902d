"""The contract between workers and backends: Engine, Rollout, WeightTransfer, and the values they exchange.

A batch is a TensorDict, one row a sequence (prompt then response). Token columns are aligned with `input_ids`: the
value at position t belongs to token t, so log_probs[t] = log p(input_ids[t] | input_ids[:t]) and log_probs[0] = 0.
Likewise values[t] is the value of the prefix input_ids[:t], the state in which token t was chosen (read off the model
at position t - 1), and values[0] = 0.
Between driver and workers token columns are jagged (nested tensors that share their offsets); micro-batches are padded
on the right, (rows, tokens) with `attention_mask`. Either form is accepted by worker methods.

| column | shape | dtype | meaning |
|---|---|---|---|
| input_ids | rows, tokens | int64 | |
| attention_mask | rows, tokens | bool | padded form only |
| response_mask | rows, tokens | bool | tokens that the policy sampled: the ones a policy loss counts |
| rollout_log_probs | rows, tokens | fp32 | by the rollout; kind in the batch's metadata `log_prob_kind` |
| old_log_probs, ref_log_probs, entropy, values, advantages, returns | rows, tokens | fp32 | |
| rewards | rows | fp32 | |
| prompt_id | rows | int64 | rows of one prompt share it (the group of GRPO) |
| weight_version | rows | int64 | the policy version that sampled the row |
| weight_versions | rows | object | of a server: [(version, number of tokens), ...] in the order of the response |
| finish_reason | rows | object | "stop", "length" or "abort" |
| row_weight | rows | fp32 | 1 for a real row, 0 for filler; every denominator uses it |
| prompt_ids | rows, tokens | int64 | input of generate |

Metadata of a batch: `temperature` (float, 1.0 where absent): engines give log_probs and entropy of logits /
temperature, so that trainer and rollout speak of the same distribution.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import attrs

from core.errors import Refused
from core.manifest import Limits
from core.mesh import Mesh

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict


class LogProbKind(StrEnum):
    """Of which distribution a rollout's log-probabilities are."""

    RAW = "raw"  # log softmax(logits)
    TEMPERATURE = "temperature"  # log softmax(logits / temperature)
    PROCESSED = "processed"  # after temperature, penalties and truncation (top-k, top-p, min-p), renormalised


How = Literal["mean", "sum", "max", "min", "same"]


@attrs.frozen
class Metric:
    """One number that can be joined over micro-batches (by the worker) and over dp (by collect).

    Attributes:
        total: for "mean" the weighted sum, else the value.
        weight: for "mean" the sum of weights.
        how: "mean" is sum(total) / sum(weight); "same" refuses to join values that differ.
    """

    total: float
    weight: float = 1.0
    how: How = "mean"

    @property
    def value(self) -> float:
        if self.how != "mean":
            return self.total
        return self.total / self.weight if self.weight else float("nan")

    @staticmethod
    def join(metrics: Sequence[Metric], where: str = "") -> Metric:
        """Raises Refused when the metrics are to be joined in different ways, or "same" ones differ."""
        hows = {metric.how for metric in metrics}
        if len(hows) != 1:
            raise Refused("metrics of one name are joined in different ways", have=sorted(hows), where=where)
        how = hows.pop()
        totals = [metric.total for metric in metrics]
        if how in ("mean", "sum"):
            return Metric(sum(totals), sum(metric.weight for metric in metrics), how)
        if how == "same" and len(set(totals)) > 1:
            raise Refused("a metric that must be the same everywhere differs", have=totals, where=where)
        return Metric(min(totals) if how == "min" else max(totals), 1.0, how)

    @staticmethod
    def join_all(parts: Sequence[Mapping[str, Metric]]) -> dict[str, Metric]:
        """Join dictionaries of metrics key by key, in order of first appearance."""
        names = dict.fromkeys(name for part in parts for name in part)
        return {name: Metric.join([part[name] for part in parts if name in part], name) for name in names}


@attrs.frozen
class LossScale:
    """Denominators over all ranks of one optimizer step."""

    num_tokens: float  # sum of response_mask * row_weight
    num_rows: float  # sum of row_weight


class LossFn(Protocol):
    """A micro-batch's share of a step's loss.

    `needs` names the model outputs it reads ("log_probs", "entropy", "values"); gradients flow through all of them. It
    may also have `reads`, the columns that a micro-batch must have: a batch that lacks one is then refused.
    Outputs and micro-batch are padded, (rows, tokens). The share is already divided by `scale`, so that the loss is a
    plain sum over micro-batches and dp ranks. It sees whole rows whatever sp or cp do.
    """

    needs: frozenset[str]

    def __call__(
        self, outputs: Mapping[str, torch.Tensor], batch: TensorDict, scale: LossScale
    ) -> tuple[torch.Tensor, dict[str, Metric]]: ...


@attrs.frozen
class LossSpec:
    """A loss that can be shipped to workers in any environment: 'module:factory', called with the options."""

    factory: str
    options: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.frozen
class MicroResult:
    """What a micro-batch gave: the requested outputs, padded (rows, tokens) and detached, and metrics."""

    outputs: TensorDict | None
    metrics: Mapping[str, Metric]


@attrs.frozen
class StepInfo:
    grad_norm: float  # before clipping
    skipped: bool  # gradients were not finite: nothing was changed


@attrs.frozen
class WeightSpec:
    """One tensor of a model as save_pretrained writes it (Qwen3-MoE: one name an expert, not the fused parameter)."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # "float32", "bfloat16"
    together: str | None = None  # specs with one value load in one go (q, k, v; gate, up)


@runtime_checkable
class Engine(Protocol):
    """A training backend on one rank.

    Workers plan micro-batches, set the scale, join metrics and restore row order; the engine owns forward, backward,
    accumulation without needless synchronisation, pipeline schedule and optimizer.
    """

    @property
    def mesh(self) -> Mesh: ...
    @property
    def limits(self) -> Limits: ...

    def initialize(self) -> None: ...

    def train_mode(self) -> AbstractContextManager[None]: ...
    def eval_mode(self) -> AbstractContextManager[None]:
        """Both modes load and offload as configured."""
        ...

    def forward_backward(
        self,
        micro_batches: Sequence[TensorDict],
        loss_fn: LossFn | None,
        scale: LossScale,
        *,
        forward_only: bool = False,
        outputs: frozenset[str] = frozenset(),
    ) -> list[MicroResult] | None:
        """Run padded micro-batches, the same number on every rank.

        Afterwards the gradient is the plain SUM of the shares over all micro-batches and dp ranks, each token once: the
        engine undoes FSDP's averaging, Megatron's 1/num_microbatches, and factors of cp, sp or dp. Results on every
        rank of the last pipeline stage, None elsewhere. When training, outputs are dropped micro-batch by micro-batch.
        """
        ...

    def optimizer_zero_grad(self) -> None: ...
    def optimizer_step(self) -> StepInfo: ...
    def lr_scheduler_step(self) -> float:
        """Move the schedule on; gives the learning rate that the step just taken used."""
        ...

    def weight_specs(self, adapter: Literal["merged", "only"] = "merged") -> Sequence[WeightSpec]: ...
    def export_weights(
        self, adapter: Literal["merged", "only"] = "merged", dst: Literal["all", "first"] = "all"
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Collective: every rank iterates to the end. Full tensors one at a time, in the order of weight_specs; on
        ranks that dst leaves out, the tensor is empty."""
        ...

    def load_weights(self, stream: Iterator[tuple[str, torch.Tensor]]) -> None: ...
    def adapter_disabled(self) -> AbstractContextManager[None]:
        """The reference policy without a second model."""
        ...

    def to(self, device: Literal["cpu", "device"], *, model: bool, optimizer: bool, grad: bool) -> None: ...
    def save_checkpoint(self, path: str, *, step: int) -> None:
        """Collective. Refused on all ranks when any rank cannot write; then `path` does not exist afterwards."""
        ...

    def load_checkpoint(self, path: str) -> int:
        """Collective. Returns the step. Refused, with nothing changed, when it is of another model."""
        ...

    def shutdown(self) -> None: ...


@attrs.frozen
class SamplingParams:
    """How to sample. Results are prompt-major: the num_samples rows of a prompt stand together."""

    num_samples: int = 1
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None  # with row seeds, sample j of the prompt with prompt_id i draws from (seed, i, j)
    log_probs: LogProbKind = LogProbKind.TEMPERATURE

    def __attrs_post_init__(self) -> None:
        def need(ok: bool, name: str, want: str) -> None:
            if not ok:
                raise Refused(f"illegal sampling parameter {name}", have=getattr(self, name), want=want)

        need(self.num_samples >= 1, "num_samples", "at least 1")
        need(self.max_new_tokens >= 1, "max_new_tokens", "at least 1")
        need(0 <= self.min_new_tokens <= self.max_new_tokens, "min_new_tokens", "0..max_new_tokens")
        need(self.temperature >= 0, "temperature", "0 (greedy) or more")
        need(0 < self.top_p <= 1, "top_p", "above 0, at most 1")
        need(self.top_k >= 0, "top_k", "0 (off) or more")
        need(0 <= self.min_p < 1, "min_p", "0 (off) up to below 1")
        need(self.repetition_penalty > 0, "repetition_penalty", "above 0")


MemoryTag = Literal["weights", "kv_cache"]


@runtime_checkable
class Rollout(Protocol):
    """A generating backend on one rank."""

    @property
    def mesh(self) -> Mesh: ...
    @property
    def weight_version(self) -> int | None:
        """None: no valid weights, and generate is refused."""
        ...

    def initialize(self) -> None: ...
    def generate(self, prompts: TensorDict, sampling: SamplingParams, *, min_version: int | None = None) -> TensorDict:
        """prompt_ids (rows) -> the batch columns above (rows * num_samples), token columns jagged.

        Raises:
            Refused: there are no valid weights, or their version is below min_version.
        """
        ...

    def release(self, tags: Sequence[MemoryTag]) -> None: ...
    def resume(self, tags: Sequence[MemoryTag]) -> None: ...

    def begin_weight_update(self, specs: Sequence[WeightSpec], version: int) -> None:
        """Check every name, shape and dtype against the model before anything changes: Refused lists matched, missing
        and unexpected. From here until finish, weight_version is None."""
        ...

    def load_bucket(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Tensors may be reused after return."""
        ...

    def finish_weight_update(self) -> None:
        """Caches that depend on weights are dropped; weight_version becomes the update's version."""
        ...

    def abort_weight_update(self) -> None:
        """weight_version stays None unless the update was fully staged. Where nothing was loaded yet, the version of
        the weights before it may come back."""
        ...

    def shutdown(self) -> None: ...


@attrs.frozen
class GenerationDelta:
    """Tokens that a server has sampled since the last delta."""

    request_id: str
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    weight_version: int
    finish_reason: str | None = None


PauseMode = Literal["keep", "wait", "abort"]


class RolloutServer(Rollout, Protocol):
    """A rollout that serves requests while others run. A weight update may come in their midst; they go on with the new
    weights. `generate` adds the column weight_versions, and has the oldest of these as weight_version."""

    def submit(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        prompt_id: int = 0,
        sample: int = 0,
    ) -> AsyncIterator[GenerationDelta]:
        """One response, of a request that begins when the first delta is asked for. The last delta, which may be
        without tokens, has a finish_reason. With row seeds it draws from (sampling.seed, prompt_id, sample).

        Raises:
            Refused: at once: as generate, or num_samples is not 1.
        """
        ...

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End these requests, or all; those that have ended are passed over. Partial results are kept."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Return when nothing runs: requests are kept for later, awaited or aborted. New ones wait."""
        ...

    async def resume_generation(self) -> None: ...
    async def check_health(self) -> None:
        """Raises ManymeshError where it will never answer again."""
        ...


class TransferRound(Protocol):
    """How the ends of a transfer hear of each other during one sync. No wait is without a deadline, and all end when
    an end has stopped the round."""

    @property
    def timeout_s(self) -> float: ...
    def put(self, key: str, value: str | bytes = b"1") -> None: ...
    def get(self, key: str, what: str) -> bytes:
        """Wait for what an end puts under the key; `what` is for the error at the deadline."""
        ...

    def wait_until(self, done: Callable[[], bool], what: str, pause: Callable[[float], None] = ...) -> None:
        """Poll `done`; between polls `pause` waits for the seconds it is given, or less."""
        ...


class WeightTransfer(Protocol):
    """A kind of link that carries buckets of bytes from one rank of a trainer to all ranks of the rollouts.

    It knows nothing of tensors' names, of versions or of digests: whoever uses it cuts and joins, verifies and commits,
    the same way for every kind. `send` and `receive` run in a thread of their own and may block; they raise what goes
    wrong, and wait by means of the round. A factory gets `device`, "cpu" or "cuda": where pieces lie that are sent,
    and where received ones should.
    """

    def connect(self, round_: TransferRound, index: int, num_receivers: int, host: str) -> None:
        """Meet the other ends. `index` 0 is the sender, receivers count from 1; `host` is this node's address."""
        ...

    def send(self, round_: TransferRound, number: int, pieces: Sequence[torch.Tensor]) -> None:
        """Send bucket `number` (from 0) of a sync: flat uint8 tensors, which are not touched after the return. At most
        two buckets are sent and not freed."""
        ...

    def receive(self, round_: TransferRound, number: int, sizes: Sequence[int]) -> Sequence[torch.Tensor]:
        """The pieces of a bucket, of these numbers of bytes. They stay as they are until bucket number + 2 is asked
        for."""
        ...

    def free(self, number: int) -> None:
        """At the sender: all receivers have loaded the bucket."""
        ...

    def close(self) -> None:
        """Let go of everything, also in the midst of a sync that was stopped. Can be called twice."""
        ...
