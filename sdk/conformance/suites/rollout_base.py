"""What the rollouts' suites share: one rollout, tiny models and their reference, rows as they are looked at."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file
from tensordict import TensorDict
from transformers import AutoModelForCausalLM

from core.batch import jagged
from core.engine import WeightSpec
from core.manifest import Capability
from core.rollout import LogProbKind, Rollout, SamplingParams
from manymesh.parts.rollout_checks import resume_memory
from manymesh.parts.weight_state import RESUME_ORDER
from sdk.conformance.base import Conformance, Session
from sdk.testing import character_tokenizer

CONTEXT = 512  # tokens, of the models here
EOS = 2
Weights = dict[str, torch.Tensor]


def prompts(*rows: Sequence[int], prompt_id: Sequence[int] | None = None) -> TensorDict:
    """A batch of jagged prompts."""
    batch = TensorDict({}, batch_size=[len(rows)])
    batch.set("prompt_ids", jagged([torch.tensor(list(row)) for row in rows]))
    if prompt_id is not None:
        batch.set("prompt_id", torch.tensor(list(prompt_id)))
    return batch


def sequences(*rows: Sequence[int]) -> TensorDict:
    """A batch of jagged sequences to score."""
    batch = TensorDict({}, batch_size=[len(rows)])
    return batch.set("input_ids", jagged([torch.tensor(list(row)) for row in rows]))


@attrs.frozen(eq=False)
class Row:
    """One row of what a rollout gave.

    Attributes:
        ids, mask, all_log_probs: of prompt and response.
    """

    ids: list[int]
    mask: list[bool]
    all_log_probs: torch.Tensor

    @property
    def prompt(self) -> list[int]:
        return [token for token, is_sampled in zip(self.ids, self.mask, strict=True) if not is_sampled]

    @property
    def tokens(self) -> list[int]:
        return [token for token, is_sampled in zip(self.ids, self.mask, strict=True) if is_sampled]

    @property
    def log_probs(self) -> torch.Tensor:
        """Of the response's tokens."""
        return self.all_log_probs[torch.tensor(self.mask)]


def rows_of(batch: TensorDict) -> list[Row]:
    columns = (batch[name].unbind() for name in ("input_ids", "response_mask", "rollout_log_probs"))
    return [Row(ids.tolist(), mask.tolist(), values) for ids, mask, values in zip(*columns, strict=True)]


def responses(batch: TensorDict) -> list[list[int]]:
    return [row.tokens for row in rows_of(batch)]


@torch.no_grad()
def following(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """Logits of what follows each token, (tokens, vocab), fp32."""
    logits: torch.Tensor = model(torch.tensor([list(ids)])).logits
    return logits[0].float()


def next_logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
    return following(model, ids)[-1]


def greedy_error(model: Any, row: Row, kind: LogProbKind = LogProbKind.RAW) -> float:
    """Of a greedy row's log-probs from the model's own, the largest distance; also that of a token from the likeliest
    one, where it is another."""
    return chosen_error(model, row.prompt, row.tokens, row.log_probs.tolist(), kind)


def chosen_error(
    model: Any,
    prompt: Sequence[int],
    tokens: Sequence[int],
    log_probs: Sequence[float],
    kind: LogProbKind = LogProbKind.RAW,
    first: int = 0,
) -> float:
    """greedy_error of tokens[first:] behind what precedes them."""
    table = following(model, [*prompt, *tokens])[len(prompt) - 1 : -1].log_softmax(-1)[first:]
    at, values = torch.tensor(tokens[first:]), torch.tensor(log_probs[first:])
    want = table.gather(1, at[:, None])[:, 0]
    below = table.amax(-1) - want
    if kind is LogProbKind.PROCESSED:
        want = torch.zeros_like(want)
    return float(torch.maximum((values - want).abs(), below).max())


def specs(weights: Weights) -> list[WeightSpec]:
    return [WeightSpec(name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in weights.items()]


def buckets(weights: Weights, size: int = 3) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Last names first, q, k and v torn apart: order and size are the sender's business."""
    items = list(weights.items())[::-1]
    return (items[i : i + size] for i in range(0, len(items), size))


def update(rollout: Rollout, weights: Weights, version: int, size: int = 3) -> None:
    rollout.begin_weight_update(specs(weights), version)
    for bucket in buckets(weights, size):
        rollout.load_bucket(bucket)
    rollout.finish_weight_update()


class Models:
    """Random tiny models by number, on disk and as transformers loads them, each made once.

    Their weights are large enough that what they predict is far from uniform, and their heads as wide as the narrowest
    that engines take.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def directory(self, number: int, family: str = "qwen3", **options: Any) -> str:
        """A checkpoint with a tokenizer of one character a token, and a generation_config.json whose sampling must not
        slip in."""
        wide = {"hidden_size": 128} if family == "qwen2" else {"head_dim": 32}
        shape = {"seed": number, "initializer_range": 0.3, "max_position_embeddings": CONTEXT} | wide | options

        def make() -> str:
            path = self._session.model(family, **shape)
            character_tokenizer(path)
            Path(path, "generation_config.json").write_text(
                '{"eos_token_id": 2, "pad_token_id": 0, "do_sample": true, "top_k": 1, "temperature": 0.1,'
                ' "repetition_penalty": 3.0, "max_new_tokens": 1}'
            )
            return path

        path: str = self._session.once(("rollout", family, repr(sorted(shape.items()))), make)
        return path

    def weights(self, number: int, family: str = "qwen3", **options: Any) -> Weights:
        return dict(load_file(Path(self.directory(number, family, **options), "model.safetensors")))

    def reference(self, number: int, family: str = "qwen3", **options: Any) -> Any:
        """In this process, fp32."""
        directory = self.directory(number, family, **options)

        def load() -> Any:
            return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval().requires_grad_(False)

        return self._session.once(("reference", directory), load)

    @staticmethod
    def long(length: int) -> list[int]:
        """A prompt that fills whole blocks of a KV cache."""
        return [3 + i * 7 % 61 for i in range(length)]


class RolloutHolder:
    """One rollout for all tests. One that changes its weights says so, and the next finds model 1 as version 0.

    Attributes:
        processes: that its initialize() started.
    """

    def __init__(self, build: Callable[[], Rollout], weights: Callable[[], Weights]) -> None:
        self._build, self._weights = build, weights
        self._rollout: Rollout | None = None
        self.changed = False
        self.processes: frozenset[int] = frozenset()

    def get(self) -> Rollout:
        if self._rollout is not None and self.changed:
            try:
                resume_memory(self._rollout, RESUME_ORDER)
                update(self._rollout, self._weights(), 0)
            except Exception:  # a test that failed may have left anything, and has said so
                self.close()
        if self._rollout is None:
            rollout, before = self._build(), child_processes()
            rollout.initialize()  # a rollout that doesn't start is not kept for the next test
            self._rollout, self.processes = rollout, child_processes() - before
        self.changed = False
        return self._rollout

    def close(self) -> None:
        rollout, self._rollout = self._rollout, None
        if rollout is not None:
            rollout.shutdown()


class RolloutSuite(Conformance):
    """What the parts of RolloutConformance have."""

    kind = "rollout"

    @property
    def models(self) -> Models:
        return Models(self.session)

    @classmethod
    def build(cls, directory: str, **options: Any) -> Rollout:
        """A rollout that is not initialized."""
        rollout: Rollout = cls.subject().build(model=directory, **options)
        return rollout

    @pytest.fixture(scope="class")
    @classmethod
    def holder(cls, conformance_session: Session) -> Iterator[RolloutHolder]:
        models = Models(conformance_session)
        holder = RolloutHolder(lambda: cls.build(models.directory(1)), lambda: models.weights(1))
        yield holder
        holder.close()

    @pytest.fixture
    def rollout(self, holder: RolloutHolder) -> Rollout:
        """For tests that only generate: model 1 as version 0."""
        return holder.get()

    @pytest.fixture
    def live(self, holder: RolloutHolder) -> Iterator[Rollout]:
        """The same, for tests that change its weights."""
        yield holder.get()
        holder.changed = True

    @pytest.fixture
    def fresh(self) -> Iterator[Callable[..., Rollout]]:
        """`fresh(directory, **options)`: an initialized rollout of the test's own."""
        rollouts: list[Rollout] = []

        def make(directory: str, **options: Any) -> Rollout:
            rollouts.append(self.build(directory, **options))
            rollouts[-1].initialize()
            return rollouts[-1]

        yield make
        for each in rollouts:
            each.shutdown()

    # Sampling, whatever is offered

    @classmethod
    def offers(cls, capability: Capability) -> bool:
        return capability in cls.capabilities()

    @classmethod
    def kinds(cls) -> list[LogProbKind]:
        """Of log-probabilities, those that are offered."""
        return [kind for kind in LogProbKind if cls.offers(capability_of(kind))]

    @property
    def log_prob_kind(self) -> LogProbKind:
        """What tests ask for that aren't about it: the contract's default where that is offered."""
        return LogProbKind.TEMPERATURE if LogProbKind.TEMPERATURE in self.kinds() else self.kinds()[0]

    def sampling(self, **options: Any) -> SamplingParams:
        return SamplingParams(**({"log_probs": self.log_prob_kind} | options))

    def greedy(self, max_new_tokens: int = 8, **options: Any) -> SamplingParams:
        return self.sampling(temperature=0.0, max_new_tokens=max_new_tokens, **options)

    def seed(self, seed: int) -> dict[str, Any]:
        """To hold a test's chance fixed where that can be."""
        return {"seed": seed} if self.offers(Capability.ROW_SEEDS) else {}


def capability_of(kind: LogProbKind) -> Capability:
    return Capability(f"log_probs_{kind.value}")


def child_processes(of: int | str = "self") -> frozenset[int]:
    """Ids of the processes below one, but for Python's own resource tracker, which stays. By /proc: none where the
    system has no such files."""
    pids: set[int] = set()
    for children in Path(f"/proc/{of}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            pids.update(map(int, children.read_text().split()))
    below = frozenset(pids).union(*map(child_processes, pids))
    return frozenset(
        pid for pid in below if (words := command(pid)) and b"multiprocessing.resource_tracker" not in words
    )


def command(pid: int) -> bytes:
    """A process's command line; none where it has ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
