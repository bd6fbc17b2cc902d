"""What the suites of training engines share: what they run on every rank, and what they compare it with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import attrs
import torch
from tensordict import TensorDict

from core.batch import select, to_jagged, to_padded
from core.config import OptimizerConfig
from core.errors import Refused
from core.loss import LossFn
from manymesh.parts.schedule import lr_factor
from sdk.conformance.base import Subject, gate
from sdk.conformance.closeness import assert_close
from sdk.conformance.suites.mesh import MeshSuite
from sdk.reference import BOTH, TEMPERATURE, PlainTrainer, PolicyLoss, ValueLoss, make_batch, scale_of

Tensors = dict[str, torch.Tensor]

# With an eps far above the gradients AdamW's first step is lr / eps times the gradient: it shows in what moved.
PLAIN_STEP = OptimizerConfig(lr=1.0, eps=1.0, weight_decay=0.0, max_grad_norm=0.0)
# Clipping, decay and a schedule that changes with every step.
FULL = OptimizerConfig(
    lr=3e-3, weight_decay=0.1, max_grad_norm=0.5, schedule="cosine", warmup_steps=2, total_steps=6, min_lr_ratio=0.1
)
BATCHES = tuple(make_batch(seed=seed, advantage=0.5) for seed in range(4))


def same_for_every_model_type(test: Any) -> Any:
    """A test that does not depend on the model type: it runs with language models where those are offered too."""

    def closed(suite: Any) -> str:
        other = suite.is_value() and "language_model" in suite.manifest().model_types
        return "the same for every model type; runs with language_model" if other else ""

    return gate(closed)(test)


class EngineSuite(MeshSuite):
    """Attributes that an adopter may set besides those of Conformance.

    Attributes:
        family, model_options: of the tiny models (sdk.testing.tiny_model), where the engine doesn't know the default.
    """

    kind = "engine"
    family: ClassVar[str] = "qwen3"
    model_options: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def is_value(cls) -> bool:
        return cls.model_type == "value_model"

    def model_of_suite(self, **options: Any) -> str:
        return self.model(self.family, value_model=self.is_value(), **self.model_options, **options)

    def outputs(self) -> frozenset[str]:
        return ValueLoss.needs if self.is_value() else BOTH

    def loss(self) -> LossFn:
        return ValueLoss() if self.is_value() else PolicyLoss()

    def assert_near(self, have: torch.Tensor, want: torch.Tensor, what: str) -> None:
        """Outputs within the bounds of the suite's dtype. Raises AssertionError."""
        assert_close(have, want, atol=self.bounds.atol, rtol=self.bounds.rtol, what=what)

    def trained(self, world_size: int, optimizer: OptimizerConfig = PLAIN_STEP, **options: Any) -> list[Trained]:
        """Two steps on every rank, made once for the same arguments."""
        model = self.model_of_suite()
        return self.once(
            ("trained", world_size, optimizer, options),
            lambda: self.on(world_size, train, model, BATCHES[:2], self.loss(), optimizer, **options),
        )

    def plain(self, optimizer: OptimizerConfig = PLAIN_STEP, batches: Sequence[TensorDict] = BATCHES[:2]) -> Trained:
        """The same by one process with a plain transformers model."""
        key = ("plain", self.model_of_suite(), optimizer, [id(batch) for batch in batches])
        make = partial(plain_training, self.model_of_suite(), self.is_value(), optimizer, batches)
        run: Trained = self.session.once(repr(key), make)  # the same for every engine
        return run


@attrs.frozen
class Trained:
    """What a run gave, on one rank.

    Attributes:
        outputs: of the first batch, before training; None where the pipeline's last stage is elsewhere.
        losses, norms, rates: by step: this rank's sum of shares, the gradient's norm, the learning rate used.
        last: whether the rank has results, i.e. is of the last stage.
    """

    outputs: Tensors | None
    losses: list[float]
    norms: list[float]
    rates: list[float]
    start: Tensors
    end: Tensors
    last: bool = True
    dp_rank: int = 0
    is_collect: bool = True


def plain_training(model: str, value_model: bool, optimizer: OptimizerConfig, batches: Sequence[TensorDict]) -> Trained:
    trainer = PlainTrainer(model, optimizer, value_model=value_model)
    start = trainer.weights()
    outputs = {name: value.detach() for name, value in trainer.outputs(batches[0]).items()}
    steps = [trainer.step(batch) for batch in batches]
    rates = [optimizer.lr * lr_factor(optimizer, number) for number in range(len(batches))]
    losses, norms = ([step[i] for step in steps] for i in range(2))
    return Trained(outputs, losses, norms, rates, start, trainer.weights())


def train(
    rank: int,
    world_size: int,
    subject: Subject,
    model: str,
    batches: Sequence[TensorDict],
    loss: LossFn,
    optimizer: OptimizerConfig,
    *,
    num_micro: int = 1,
    **options: Any,
) -> Trained:
    with engine_of(subject, model, optimizer, **options) as engine:
        start, outputs = weights(engine), infer(engine, batches[0], loss.needs)
        steps = [step(engine, batch, loss, num_micro) for batch in batches]
        losses, norms, rates = ([each[i] for each in steps] for i in range(3))
        return Trained(
            outputs=outputs,
            losses=losses,
            norms=norms,
            rates=rates,
            start=start,
            end=weights(engine),
            last=outputs is not None,
            dp_rank=engine.mesh.dp_rank,
            is_collect=engine.mesh.is_collect,
        )


@contextmanager
def engine_of(subject: Subject, model: str, optimizer: OptimizerConfig = PLAIN_STEP, **options: Any) -> Iterator[Any]:
    """An engine, initialized, for the time of a with-block."""
    engine = subject.build(model=model, optimizer=attrs.asdict(optimizer), **options)
    try:
        engine.initialize()
        yield engine
    finally:
        engine.shutdown()


def micro_batches(engine: Any, batch: TensorDict, number: int = 1) -> list[TensorDict]:
    """This dp rank's rows, dealt in turn, in micro-batches that differ in rows and in width."""
    mesh, limits = engine.mesh, engine.limits
    rows = torch.arange(len(batch))[mesh.dp_rank :: mesh.dp_size]
    number = -(-min(number, len(rows)) // limits.micro_batch_multiple) * limits.micro_batch_multiple
    return [trim_width(select(batch, part), limits.sequence_multiple) for part in rows.tensor_split(number)]


def trim_width(batch: TensorDict, multiple: int) -> TensorDict:
    """As narrow as its longest row, with the noise that its padding holds."""
    longest = max(1, int(batch["attention_mask"].sum(1).max()) if len(batch) else 1)
    width = -(-longest // multiple) * multiple
    if width > batch["input_ids"].shape[1]:
        return to_padded(to_jagged(batch), multiple=multiple)
    columns = {name: value[:, :width] if value.ndim > 1 else value for name, value in batch.items()}
    return TensorDict({name: value.contiguous() for name, value in columns.items()}, batch.batch_size)


def step(engine: Any, batch: TensorDict, loss: LossFn, num_micro: int = 1) -> tuple[float, float, float, bool]:
    """One optimizer step on a global batch: this rank's loss, the gradient's norm, the rate, whether it was skipped."""
    with engine.train_mode():
        engine.optimizer_zero_grad()
        results = engine.forward_backward(
            micro_batches(engine, batch, num_micro), loss, scale_of(batch), temperature=TEMPERATURE
        )
        info = engine.optimizer_step()
        rate = engine.lr_scheduler_step()
    total = sum(result.metrics["loss"].total for result in results or ())
    return total, info.grad_norm, rate, info.skipped


def infer(
    engine: Any,
    batch: TensorDict,
    outputs: frozenset[str],
    mode: Callable[[], Any] | None = None,
    temperature: float = TEMPERATURE,
) -> Tensors | None:
    """Outputs of the whole batch on this rank, whatever its peers are given; None where the last stage is elsewhere."""
    wide = batch if batch["input_ids"].shape[1] % engine.limits.sequence_multiple == 0 else trim_width(batch, 1)
    parts = [wide] * engine.limits.micro_batch_multiple
    with mode() if mode else engine.eval_mode():
        results = engine.forward_backward(
            parts, None, scale_of(batch), temperature=temperature, forward_only=True, outputs=outputs
        )
    if results is None or results[0].outputs is None:
        return None
    return {name: value.detach().cpu().clone() for name, value in results[0].outputs.items()}


def weights(engine: Any) -> Tensors:
    return {name: value.cpu() for name, value in engine.export_weights()}


def differing(have: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor]) -> list[str]:
    """Names that are only on one side, or whose tensors differ in a bit, a shape or a dtype."""
    both = have.keys() & want.keys()
    return [
        *sorted(have.keys() ^ want.keys()),
        *(name for name in both if have[name].dtype != want[name].dtype or not torch.equal(have[name], want[name])),
    ]


def answer_to(call: Callable[[], Any]) -> str:
    """How a request is answered: "refused: " and the message, the name of another error, or "taken"."""
    try:
        call()
    except Refused as error:
        return f"refused: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "taken"
