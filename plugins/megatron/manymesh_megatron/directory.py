"""The *.safetensors of a Hugging Face directory: names and shapes at once, tensors when they are asked for."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors import SafetensorError, safe_open

from core.engine import WeightSpec
from core.errors import Refused

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MEND = "give a directory written by save_pretrained: config.json and *.safetensors"
# The decoder's tensors, without a buffer that old versions wrote. Heads that the model doesn't use are left alone.
DECODER = re.compile(r"model\.(?!.*\.rotary_emb\.inv_freq$)")


class SavedDirectory:
    """An open directory. Its files are mapped, so what nobody asks for is not read.

    Raises:
        Refused: it has no *.safetensors as save_pretrained writes them, or one is absent or unreadable.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path).expanduser()
        with ExitStack() as stack:
            files = [self._map(stack, name) for name in self._file_names()]
            self._tensors: dict[str, Any] = {name: file.get_slice(name) for file in files for name in file.keys()}  # noqa: SIM118
            self._stack = stack.pop_all()

    def check(self, specs: Mapping[str, WeightSpec], optional: Container[str]) -> list[str]:
        """The names of `specs` that are there; what is optional may be absent.

        Raises:
            Refused: others are absent, a shape differs, or the decoder has weights here that `specs` doesn't know.
        """
        missing = [name for name in specs if name not in self._tensors and name not in optional]
        unknown = [name for name in self._tensors if name not in specs and DECODER.match(name)]
        if missing or unknown:
            raise self._refusal(
                "the weights of the directory are not the model's",
                have=f"{len(missing)} missing: {missing[:8]}, {len(unknown)} unknown: {unknown[:8]}",
                want=f"each of the model's {len(specs)} tensors",
            )
        names = [name for name in specs if name in self._tensors]
        for name in names:
            if (shape := tuple(self._tensors[name].get_shape())) != specs[name].shape:
                raise self._refusal(
                    f"the weight {name!r} has another shape than the model's", have=shape, want=specs[name].shape
                )
        return names

    def tensor(self, name: str) -> Any:
        """Indexed with a tuple of slices, one a dim, it reads that part and gives it as a tensor."""
        return self._tensors[name]

    def __enter__(self) -> SavedDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tensors = {}
        self._stack.close()

    def _file_names(self) -> list[str]:
        index = self._path / INDEX
        if (self._path / SINGLE).is_file():
            return [SINGLE]
        if not index.is_file():
            pickled = sorted(each.name for each in self._path.glob("pytorch_model*.bin"))
            raise self._refusal(
                f"the model directory {str(self._path)!r} has no {SINGLE} and no {INDEX}",
                have=pickled[:8] or sorted(each.name for each in self._path.glob("*"))[:8],
                mend="convert it: load it with transformers and call save_pretrained" if pickled else MEND,
            )
        try:
            return sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._refusal(f"{INDEX} is no index", have=f"{type(error).__name__}: {error}") from error

    def _map(self, stack: ExitStack, name: str) -> Any:
        try:
            return stack.enter_context(safe_open(self._path / name, "pt"))
        except (OSError, SafetensorError) as error:
            raise self._refusal(f"cannot read {name!r}", have=f"{type(error).__name__}: {error}") from error

    def _refusal(self, message: str, *, have: object, want: object = None, mend: str = MEND) -> Refused:
        return Refused(message, have=have, want=want, where=str(self._path), mend=mend)
