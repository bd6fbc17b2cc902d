"""What a run's ranks would hold of their devices, moment by moment of a step, by their backends' estimates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from core.manifest import Kind
from core.memory import Load, Memory, Phase
from core.model_facts import ModelFacts
from core.registry import Backend, EngineRegistry
from manymesh.recipes.grpo.config import GrpoConfig
from manymesh.recipes.grpo.placement import Placement
from manymesh.workers.micro_batch import MicroBatchConfig
from manymesh.workers.rollout import RolloutWorkerConfig
from manymesh.workers.training import TrainingWorkerConfig

GIB = 2**30
KINDS = ("parameters", "gradients", "optimizer", "activations", "kv_cache")
# Of each device: CUDA's context, NCCL's buffers, what the allocator cannot use. A guess, not measured.
RESERVE = 3 * GIB
# What each part does in a moment; the one that works is named, the others are idle.
WORKS: Mapping[str, tuple[str, Phase]] = {
    "build the reference": ("ref", Phase.LOAD),
    "build the policy": ("actor", Phase.LOAD),
    "build the rollout": ("rollout", Phase.LOAD),
    "generate": ("rollout", Phase.GENERATE),
    "log-probs": ("actor", Phase.EVAL),
    "log-probs of the reference": ("ref", Phase.EVAL),
    "update": ("actor", Phase.TRAIN),
    "weights": ("actor", Phase.EXPORT),
}
BUILT_AFTER = {"build the reference": ("actor", "rollout"), "build the policy": ("rollout",)}


@attrs.frozen
class Moment:
    """One rank in one part of a step.

    Attributes:
        name: one of WORKS.
        parts: what "actor", "ref" and "rollout" hold, those that the rank has.
    """

    name: str
    rank: int
    parts: Mapping[str, Memory]

    @property
    def total(self) -> int:
        """Bytes of the device."""
        return sum(each.total for each in self.parts.values())

    @property
    def host(self) -> int:
        """Bytes of the host's memory."""
        return sum(each.host for each in self.parts.values())

    @property
    def largest(self) -> tuple[str, str]:
        """The part that holds most, and what: ("actor", "activations")."""
        sizes = {(part, kind): getattr(memory, kind) for part, memory in self.parts.items() for kind in KINDS}
        return max(sizes, key=sizes.__getitem__)

    def __str__(self) -> str:
        texts = ", ".join(
            f"{part} {kind.replace('_', ' ')} {getattr(memory, kind) / GIB:.1f}"
            for part, memory in self.parts.items()
            for kind in KINDS
            if getattr(memory, kind) >= GIB / 20
        )
        host = f"; {self.host / GIB:.1f} GiB of the host" if self.host else ""
        return f"{self.total / GIB:.1f} GiB on rank {self.rank}{f' ({texts})' if texts else ''}{host}"


def worst_moments(placement: Placement, device: str, device_bytes: int | None) -> dict[str, list[Moment]]:
    """By pool ("pool", "rollout_pool"), of each moment the rank that holds most, in the order of a run.

    Parts whose backend gives no estimate count nothing; `unknown_parts` names them.

    Args:
        device: torch device type of the parts whose pool isn't denied GPUs.
        device_bytes: memory of one device.

    Raises:
        Refused: see core.memory.MemoryEstimator, and Placement.check, which comes first.
    """
    config, worker = placement.config, placement.worker()
    shared = config.rollout_pool is None
    trainers = {"actor": worker.actor, "ref": worker.ref, "rollout": worker.rollout if shared else None}
    pools = {"pool": (config.pool.world_size, trainers)}
    if config.rollout_pool is not None:
        pools["rollout_pool"] = (config.rollout_pool.world_size, {"rollout": placement.rollout_worker()})
    moments = {}
    for pool, (world_size, configs) in pools.items():
        parts = {
            name: _Part.of(config, name, each, world_size, device, device_bytes)
            for name, each in configs.items()
            if each is not None
        }
        moments[pool] = list(_worst(parts, world_size))
    return moments


def unknown_parts(placement: Placement) -> list[str]:
    """The parts of the run whose backend gives no estimate."""
    worker = placement.worker()
    rollout = placement.rollout_worker()
    parts = {"actor": worker.actor, "ref": worker.ref, "rollout": rollout}
    return [name for name, part in parts.items() if part is not None and _backend(part).load("memory") is None]


@attrs.frozen
class _Part:
    """A part of the run in its pool.

    Attributes:
        gives_back: the rollout's memory between generating and new weights.
    """

    backend: Backend
    options: Any
    world_size: int
    model: ModelFacts
    load: Load
    gives_back: bool

    @classmethod
    def of(
        cls, run: GrpoConfig, name: str, config: Any, world_size: int, device: str, device_bytes: int | None
    ) -> _Part:
        backend, model = _backend(config), ModelFacts.read(config.engine["model"])
        # Once, since structuring options takes as long as all else together.
        options = backend.config({**config.engine, "trainable": False} if name == "ref" else config.engine)
        plan = backend.plan(options, world_size, model)
        new, context = run.sampling.max_new_tokens, model.get("max_position_embeddings")
        prompt = run.data.max_prompt_tokens or max(1, (context or 2 * new) - new)
        rows = -(-run.algorithm.prompts_per_step * run.sampling.num_samples // (plan.route.dp_size if plan else 1))
        tokens, number = 0, 1
        if isinstance(config, TrainingWorkerConfig):
            mini = -(-rows // run.algorithm.num_mini_batches)
            tokens, number = largest_micro_batch(config.micro_batch, prompt + new, mini)
        load = Load(
            device=config.device or device,
            device_bytes=device_bytes if config.device in (None, device) else None,
            micro_batch_tokens=tokens,
            num_micro_batches=number,
            prompt_tokens=prompt,
            row_tokens=prompt + new,
            rows=rows,
        )
        return cls(backend, options, world_size, model, load, getattr(config, "release_after_generate", False))

    def phases(self, rank: int) -> dict[Phase, Memory]:
        load = attrs.evolve(self.load, rank=rank)
        return {each.phase: each for each in self.backend.memory(self.options, self.world_size, self.model, load)}


def largest_micro_batch(config: MicroBatchConfig, row_tokens: int, rows: int) -> tuple[int, int]:
    """Tokens of the largest micro-batch, and how many there are where every row is as long as it may be.

    Args:
        rows: of one optimizer step on one rank.
    """
    at_once = rows
    if config.max_tokens is not None:
        at_once = min(at_once, config.max_tokens // row_tokens)
    if config.max_rows is not None:
        at_once = min(at_once, config.max_rows)
    at_once = max(1, at_once)
    number = -(-rows // at_once)
    if config.max_tokens is None or number == 1:
        return at_once * row_tokens, number
    # Shorter rows fill it better.
    most = config.max_tokens if config.max_rows is None else min(config.max_tokens, config.max_rows * row_tokens)
    return max(most, row_tokens), number


def _worst(parts: Mapping[str, _Part], world_size: int) -> Iterator[Moment]:
    every = [{name: part.phases(rank) for name, part in parts.items()} for rank in range(world_size)]
    for moment, (worker, _) in WORKS.items():
        if worker in parts:
            by_rank = [
                Moment(moment, rank, {name: each for name in parts if (each := _held(parts, moment, name, phases))})
                for rank, phases in enumerate(every)
            ]
            yield max(by_rank, key=lambda each: (each.total, each.host))


def _held(
    parts: Mapping[str, _Part], moment: str, name: str, phases: Mapping[str, Mapping[Phase, Memory]]
) -> Memory | None:
    """What a part holds in a moment; None where it isn't built yet, or nobody knows."""
    worker, phase = WORKS[moment]
    estimates = phases[name]
    if name in BUILT_AFTER.get(moment, ()) or not estimates:
        return None
    if name == worker:
        return estimates.get(phase, estimates[Phase.IDLE])
    if not parts[name].gives_back or Phase.RELEASED not in estimates:
        return estimates[Phase.IDLE]
    # New weights come before the KV cache is taken again.
    return attrs.evolve(estimates[Phase.IDLE], kv_cache=0) if moment == "weights" else estimates[Phase.RELEASED]


def _backend(part: TrainingWorkerConfig | RolloutWorkerConfig) -> Backend:
    kind: Kind = "rollout" if isinstance(part, RolloutWorkerConfig) else "engine"
    return EngineRegistry.default().find(part.backend, kind, elsewhere=True)
