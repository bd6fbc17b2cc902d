"""Structuring plain data into attrs classes, with errors that name path, value and nearest name; and the options that
all training and all rollout backends share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, cast

import attrs

from core.errors import ConfigError, Refused, did_you_mean

T = TypeVar("T")
Dtype = Literal["auto", "float32", "bfloat16", "float16"]


@attrs.frozen
class OptimizerConfig:
    """AdamW, gradient clipping and the learning rate's schedule."""

    lr: float = 1e-6  # the learning rate, which the schedule varies
    betas: tuple[float, float] = (0.9, 0.999)  # decay of the running means of gradients and of their squares
    eps: float = 1e-8  # added to the denominator of a step
    weight_decay: float = 0.01  # on matrices only; not on biases and norms
    max_grad_norm: float = 1.0  # 0: no clipping
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # of the rate, after the warm-up
    warmup_steps: int = 0  # steps in which the rate rises linearly to lr
    total_steps: int | None = None  # needed by linear and cosine
    min_lr_ratio: float = 0.0  # the schedule ends at lr * min_lr_ratio

    def __attrs_post_init__(self) -> None:
        if self.lr < 0 or self.warmup_steps < 0 or self.max_grad_norm < 0:
            raise ConfigError("lr, warmup_steps and max_grad_norm are not negative", have=self)
        if self.schedule != "constant" and not self.total_steps:
            raise ConfigError(
                f"schedule {self.schedule!r} needs total_steps", have=self.total_steps, mend="set total_steps"
            )


@attrs.frozen
class EngineConfig:
    """What every training backend understands. Backends subclass it and add their own options."""

    model: str  # directory of a Hugging Face checkpoint
    trainable: bool = True  # False: no gradients, no optimizer (a reference policy)
    dtype: Dtype = "auto"  # of the parameters; auto: what is right for the device
    optimizer: OptimizerConfig = attrs.field(factory=OptimizerConfig)
    seed: int = 0  # of the random generators of training, such as dropout's

    def on(self, device: str) -> Self:
        """The options as they hold on a type of device ("cpu", "cuda"): none is left to the device any more.

        A pure function that an engine calls where it is built, since only there the device is known. An engine that
        can compute in fewer bits than its optimizer steps in has a rule of its own. Here "auto" is float32, on every
        device: a step of a small learning rate is lost in 16 bits.
        """
        return attrs.evolve(self, dtype="float32") if self.dtype == "auto" else self


@attrs.frozen
class RolloutConfig:
    """What every rollout backend understands. Backends subclass it and add their own options."""

    model: str  # directory of a Hugging Face checkpoint
    dtype: Dtype = "auto"  # of weights and computation; auto: bfloat16 on GPUs, float32 on CPU
    seed: int = 0  # of the engine's own random generators; SamplingParams.seed is that of what is sampled
    load: Literal["checkpoint", "none"] = "checkpoint"  # none: no weights before the first update, and none are read

    def on(self, device: str) -> Self:
        """As EngineConfig.on."""
        return attrs.evolve(self, dtype=sampling_dtype(device)) if self.dtype == "auto" else self


def sampling_dtype(device: str) -> Dtype:
    """What "auto" is for weights that nobody trains: GPUs' fast units and attention kernels want 16 bits."""
    return "float32" if device == "cpu" else "bfloat16"


def left_to_device(config: Any, device: str) -> dict[str, Any]:
    """The options that a config leaves to the device, with what they are on it; none of a config without `on`."""
    if not isinstance(config, EngineConfig | RolloutConfig):
        return {}
    there = config.on(device)
    names = [field.name for field in attrs.fields(type(config))]
    return {name: getattr(there, name) for name in names if getattr(there, name) != getattr(config, name)}


def structure(cls: type[T], data: Any, where: str = "config") -> T:
    """Build `cls` from plain data. A value that already is a `cls` is returned as it is.

    Raises:
        ConfigError: unknown key, missing key, wrong type or illegal value, each with its path.
    """
    if isinstance(data, cls):
        return data
    if attrs.has(cls) and not isinstance(data, Mapping):
        raise ConfigError(f"{where} wants a mapping of options", have=repr(data), want=f"the options of {cls.__name__}")
    try:
        return cast(T, _converter().structure(data, cls))
    except Exception as error:
        raise _explain(error, where, cls) from error


def _converter() -> Any:
    import cattrs

    converter = cattrs.Converter(forbid_extra_keys=True, detailed_validation=True)

    def plain(kind: type, accepts: tuple[type, ...]) -> None:
        # cattrs' own hooks call int("x") or bool("no"); a config wants the type that was written.
        def hook(value: Any, _: Any) -> Any:
            if not isinstance(value, accepts) or (isinstance(value, bool) and kind is not bool):
                raise ConfigError(f"want {kind.__name__}, have {value!r}")
            return kind(value)

        converter.register_structure_hook(kind, hook)

    plain(int, (int,))
    plain(float, (int, float))
    plain(bool, (bool,))
    plain(str, (str, Path))
    return converter


def _explain(error: BaseException, where: str, cls: Any = None) -> ConfigError:
    """The first leaf of cattrs' tree of errors, as one error with the path in it."""
    from cattrs.errors import ClassValidationError, ForbiddenExtraKeysError, IterableValidationError

    if isinstance(error, ClassValidationError | IterableValidationError):
        owner = getattr(error, "cl", cls)
        for sub in error.exceptions:
            for note in getattr(sub, "__notes__", ()):
                at = getattr(note, "name", getattr(note, "index", None))
                if at is not None:
                    path = f"{where}[{at}]" if isinstance(at, int) else f"{where}.{at}"
                    return _explain(sub, path, getattr(note, "type", None))
            return _explain(sub, where, owner)
    if isinstance(error, ForbiddenExtraKeysError):
        names = [field.name for field in attrs.fields(error.cl)] if attrs.has(error.cl) else []
        extra = sorted(error.extra_fields)[0]
        return ConfigError(
            f"unknown key {extra!r} in {where}", where=f"{where}.{extra}", mend=did_you_mean(extra, names)
        )
    if isinstance(error, KeyError):
        return ConfigError(f"{where} is missing", where=where, want=f"a value for {error}")
    if isinstance(error, Refused):
        message = error.message if where in error.message else f"{where}: {error.message}"
        return ConfigError(message, have=error.have, want=error.want, where=where, mend=error.mend)
    return ConfigError(f"{where}: {error}", where=where, want=getattr(cls, "__name__", str(cls) if cls else None))
