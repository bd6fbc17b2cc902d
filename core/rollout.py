"""The contract of generating backends: Rollout, ReleasingRollout, ScoringRollout, RolloutServer; how to sample."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import attrs

from core.engine import WeightSpec
from core.errors import Refused
from core.mesh import Mesh

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict


class LogProbKind(StrEnum):
    """Of which distribution a rollout's log-probabilities are."""

    RAW = "raw"  # log softmax(logits)
    TEMPERATURE = "temperature"  # log softmax(logits / temperature)
    PROCESSED = "processed"  # after temperature, penalties and truncation (top-k, top-p, min-p), renormalised


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
        """prompt_ids (rows) -> the columns of core.columns (rows * num_samples), token columns jagged.

        Raises:
            Refused: there are no valid weights, or their version is below min_version.
        """
        ...

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
        """Forget the update. The version before it comes back where its weights are whole: nothing was loaded yet, or
        what was loaded is kept apart from them. Else weight_version stays None. Without an update, nothing happens."""
        ...

    def shutdown(self) -> None: ...


@runtime_checkable
class ScoringRollout(Rollout, Protocol):
    """A rollout that gives the log-probabilities of given sequences (Capability.SCORE)."""

    def score(self, sequences: TensorDict, *, temperature: float = 1.0, top_k: int = 0) -> TensorDict:
        """Log-probabilities of every token behind those before it, of softmax(logits / temperature).

        Args:
            sequences: `input_ids` (rows, tokens) int64, jagged, or padded with `attention_mask`.
            temperature: above 0.
            top_k: so many of the most likely tokens at each position; 0 for none.

        Returns:
            rows in order; jagged columns that share the offsets of a jagged input_ids: `log_probs` (rows, tokens)
            fp32, and with top_k `top_ids` int64 and `top_log_probs` fp32 (rows, tokens, top_k), most likely first. The
            value at position t belongs to token t; all are 0 at position 0. No repetition penalty, no truncation.

        Raises:
            Refused: there are no valid weights; sequences that are empty, of another vocabulary, or longer than the
                backend holds; a temperature or a top_k that it cannot give.
        """
        ...


@runtime_checkable
class ReleasingRollout(Rollout, Protocol):
    """A rollout that can free its memory while others need it (Capability.RELEASE). A rollout that does not
    offer this does not have the methods."""

    def release(self, tags: Sequence[MemoryTag]) -> None:
        """Free memory. Weights are dropped, and an update under way is forgotten with them: weight_version is None
        until they are resumed and a whole update was loaded. Without a KV cache nothing is generated.

        Raises:
            Refused: an unknown tag, or this rollout can free nothing on its device or with its options.
        """
        ...

    def resume(self, tags: Sequence[MemoryTag]) -> None:
        """Take memory again; what is not released stays as it is. Resume the weights first and the KV cache after the
        update.

        Raises:
            Refused: an unknown tag.
        """
        ...


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
    """A rollout that answers requests while others run (Capability.SERVER). Requests that run during a weight update go
    on with the new weights. `generate` adds the column weight_versions, whose oldest is weight_version."""

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
        """End these requests, or all. Requests that have ended are ignored. Partial results are kept."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Return when nothing runs. "keep" interrupts requests, which go on after resume_generation; "wait" lets them
        end; "abort" ends them. New requests wait."""
        ...

    async def resume_generation(self) -> None: ...
    async def check_health(self) -> None:
        """Raises ManymeshError where the server will not answer again."""
        ...
