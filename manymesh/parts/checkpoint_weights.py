"""What a checkpoint's model consists of, for rollouts whose engine cannot say which weights it would take."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from core.errors import Refused
from core.manifest import ModelFacts
from manymesh.parts.saved_form import saved_form
from manymesh.parts.weight_names import some


def expected_tensors(model: str) -> dict[str, torch.Tensor]:
    """What save_pretrained would write of a checkpoint's model, on meta.

    An engine's own names are those of its fused parameters, and no list of what it would take; so the model is asked of
    transformers, which makes it without memory.
    """
    config = AutoConfig.from_pretrained(model, local_files_only=True)
    with torch.device("meta"):
        return saved_form(AutoModelForCausalLM.from_config(config))[1]


def read_checkpoint(model: str, load: Literal["checkpoint", "none"]) -> tuple[ModelFacts, dict[str, torch.Tensor]]:
    """What a directory holds, and the tensors of expected_tensors.

    Args:
        load: "none": its weights may lack.

    Raises:
        Refused: there is no checkpoint, of no causal language model that transformers knows, or not all of it.
    """
    facts = ModelFacts.read(model)
    try:
        expected = expected_tensors(facts.path)
    except ValueError as error:
        raise Refused(
            f"transformers knows no causal language model in {facts.path!r}",
            have=str(error),
            where=f"model type {facts.model_type!r}",
        ) from error
    if load == "checkpoint":
        check_directory(facts.path, expected)
    return facts, expected


def check_directory(model: str, expected: Mapping[str, torch.Tensor]) -> None:
    """See that a checkpoint's safetensors have what the model needs: what they lack engines leave to chance.

    Raises:
        Refused: most names are there, some are not. Where nearly none is, the checkpoint has another way of naming,
            which the engine may know.
    """
    names: set[str] = set()
    for file in sorted(Path(model).glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            names |= set(opened.keys())
    missing = [name for name in expected if name not in names]
    if 0 < len(missing) < len(expected) / 2:
        raise Refused(
            f"the checkpoint {model!r} lacks {len(missing)} of the model's weights",
            have=f"missing {some(missing)}",
            want="a whole checkpoint, as save_pretrained writes it",
        )
