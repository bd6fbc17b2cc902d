"""A causal language model from a directory, whole, or a refusal that says what the directory lacks."""

from __future__ import annotations

from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from core.errors import Refused
from core.manifest import ModelFacts

MEND = "give a directory that save_pretrained wrote: config.json and *.safetensors"


def load_causal_lm(path: str, dtype: str, load: Literal["checkpoint", "none"] = "checkpoint", **options: Any) -> Any:
    """The transformers model of a directory, on CPU, in eval mode.

    Args:
        dtype: of its parameters, "float32" or "bfloat16".
        load: "none": its parameters hold anything, and only config.json is read.
        options: of from_pretrained, such as attn_implementation.

    Raises:
        Refused: no checkpoint is there, it lacks weights, or transformers cannot load it as a causal language model.
    """
    facts = ModelFacts.read(path)
    try:
        if load == "none":
            config = AutoConfig.from_pretrained(facts.path, local_files_only=True)
            with no_init_weights():
                return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), **options).eval()
        model, report = AutoModelForCausalLM.from_pretrained(
            facts.path, dtype=getattr(torch, dtype), local_files_only=True, output_loading_info=True, **options
        )
    except Exception as error:  # files that are cut raise whatever their reader does
        raise Refused(
            f"transformers cannot load {facts.path!r} as a causal language model",
            have=f"{type(error).__name__}: {error}",
            where=f"model type {facts.model_type!r}",
            mend="check the directory's weights, and the config's attn_implementation",
        ) from error
    # Of these transformers warns, and leaves them random.
    lacking = [*sorted(report["missing_keys"]), *(f"{name} {have}" for name, *have in report["mismatched_keys"])]
    if lacking:
        raise Refused(
            f"the checkpoint {facts.path!r} lacks {len(lacking)} of the model's weights",
            have=f"missing, or of another shape {lacking[:20]}",
            want="every parameter of the model",
            where=facts.path,
            mend=MEND,
        )
    return model.eval()
