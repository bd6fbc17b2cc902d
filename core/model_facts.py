"""Facts about a model that planning needs, read from its config.json without torch or transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from core.errors import Refused


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
            names = sorted(entry.name for entry in directory.iterdir())[:8]
            raise Refused(
                f"the model directory {str(path)!r} has no config.json", have=names, where=str(file), mend=mend
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
