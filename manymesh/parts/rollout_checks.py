"""What every rollout refuses in the same words: weights that are not there, stops that cannot be, unknown tags."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from core.errors import ManymeshError, Refused
from core.manifest import ModelFacts
from core.rollout import MemoryTag, ReleasingRollout, Rollout, SamplingParams

TAGS = ("weights", "kv_cache")


def valid_version(version: int | None, min_version: int | None, state: str) -> int:
    """The version to sample with.

    Args:
        state: what the rollout is in the middle of, where version is None.

    Raises:
        Refused: there are no valid weights, or they are older than min_version.
    """
    if version is None:
        raise Refused(
            "the rollout has no valid weights to generate with",
            have=state,
            want="weights that were loaded as a whole",
            mend="initialize(), or resume(['weights']) and run a weight update to its end",
        )
    if min_version is not None and version < min_version:
        raise Refused(
            "the rollout's weights are too old",
            have=f"version {version}",
            want=f"version {min_version} or later",
            mend="sync the weights first, or allow older ones with min_version",
        )
    return version


def check_tags(tags: Iterable[str]) -> None:
    """Raises Refused for tags that no rollout has."""
    unknown = sorted(set(tags) - set(TAGS))
    if unknown:
        raise Refused("unknown memory tags", have=unknown, want=f"some of {TAGS}")


def releasing(rollout: Rollout) -> ReleasingRollout:
    """The rollout, as one that gives memory back. Raises Refused where it doesn't offer that."""
    if not isinstance(rollout, ReleasingRollout):
        raise Refused(
            "this rollout cannot give its memory back",
            have=f"{type(rollout).__name__} without release and resume",
            mend="turn release_after_generate off, or choose a rollout with the capability release",
        )
    return rollout


def resume_memory(rollout: Rollout, tags: Sequence[MemoryTag]) -> None:
    """Take memory again that was released. A rollout that never gives it back has it."""
    if isinstance(rollout, ReleasingRollout):
        rollout.resume(tags)


def not_initialized() -> Refused:
    return Refused("the rollout has no model yet", mend="call initialize() first")


def cannot_run(engine: str, facts: ModelFacts, error: object) -> Refused:
    """Of an engine that doesn't take a model, or the options that it was given; `error` is what it says."""
    return Refused(
        f"{engine} cannot run {facts.path!r} with these options",
        have=str(error),
        where=f"model type {facts.model_type!r}",
        mend="mend the rollout's options, or choose another rollout",
    )


def no_update() -> Refused:
    return Refused("no weight update is under way", mend="call begin_weight_update first")


def not_finite(where: str) -> ManymeshError:
    """The error of a log-probability that is NaN or infinite. `where`: weight version, and rank or request."""
    return ManymeshError(
        "the model gave logits that are not finite",
        where=where,
        mend="look at the last weight update: parameters may be NaN or infinite",
    )


def check_sleep_mode(engine: str, device: str, *, sleep_mode: bool) -> None:
    """Raises Refused where an engine whose sleep mode alone frees memory, and on CUDA alone, would free nothing."""
    if device != "cuda" or not sleep_mode:
        raise Refused(
            "this rollout cannot give its memory back",
            have=f"{engine} frees nothing on CPU, and on CUDA only with sleep_mode",
            mend="turn release_after_generate off, or set sleep_mode on CUDA",
        )


def stop_ids(sampling: SamplingParams, eos: Iterable[int], vocab_size: int) -> list[int]:
    """All tokens that end a response, sorted: the model's EOS ids unless ignored, and the stop ids.

    Raises:
        Refused: a stop id is not in the vocabulary.
    """
    foreign = [token for token in sampling.stop_token_ids if not 0 <= token < vocab_size]
    if foreign:
        raise Refused("stop_token_ids are not in the vocabulary", have=foreign, want=f"0..{vocab_size - 1}")
    ends = () if sampling.ignore_eos else tuple(token for token in eos if token < vocab_size)
    return sorted({*ends, *sampling.stop_token_ids})


def check_stop_strings(sampling: SamplingParams) -> None:
    """Raises Refused for a stop string of no character."""
    if "" in sampling.stop:
        raise Refused("a stop string is empty", have=list(sampling.stop), want="at least one character each")


def eos_ids(model: str) -> tuple[int, ...]:
    """The tokens that end a text, of a checkpoint's generation_config.json, else of its config.json."""
    for file in ("generation_config.json", "config.json"):
        path = Path(model).expanduser() / file
        config = json.loads(path.read_text()) if path.is_file() else {}
        ids = config.get("eos_token_id", config.get("text_config", {}).get("eos_token_id"))
        if ids is not None:
            return tuple(ids) if isinstance(ids, list) else (ids,)
    return ()


def load_tokenizer(model: str) -> Any:
    """The tokenizer of a model's directory, for stop strings.

    Raises:
        Refused: there is none.
    """
    from transformers import AutoTokenizer

    directory = Path(model).expanduser()
    cause: Exception | None = None
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        # Without any of these files transformers makes an empty tokenizer of the model's family.
        files = {"tokenizer.json", "tokenizer_config.json", *tokenizer.vocab_files_names.values()}
        if any((directory / file).is_file() for file in files):
            return tokenizer
    except (ImportError, OSError, ValueError) as error:
        cause = error
    raise Refused(
        "stop strings need a tokenizer, and the model directory has none",
        have=cause,
        where=str(directory),
        mend="save the tokenizer into the directory, or use stop_token_ids",
    ) from cause


def has_tokenizer(model: str) -> bool:
    """Whether load_tokenizer gives one."""
    try:
        load_tokenizer(model)
    except Refused:
        return False
    return True
