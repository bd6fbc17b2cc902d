"""One rank's part of a model with its weights by name, for tests of what crosses; and directories to compare with."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors.torch import load_file, save_file

from core.manifest import ModelFacts

Tensors = dict[str, torch.Tensor]

SIZES: dict[str, dict[str, Any]] = {
    "dp4": {},
    "tp2": {"tensor_parallel": 2},
    "tp4": {"tensor_parallel": 4},  # more than key-value heads
    "pp2": {"pipeline_parallel": 2},
    "tp2, dp inside": {"tensor_parallel": 2, "order": "dp-tp-cp-ep-pp"},
    "tp2 pp2": {"tensor_parallel": 2, "pipeline_parallel": 2},
    "pp2 vpp2": {"pipeline_parallel": 2, "virtual_pipeline": 2},
    "ep2": {"expert_parallel": 2},
    "ep4": {"expert_parallel": 4},
    "etp2": {"tensor_parallel": 2},
    "tp2 ep2 etp1": {"tensor_parallel": 2, "expert_parallel": 2, "expert_tensor_parallel": 1},
    "tp2 ep2 etp2": {"tensor_parallel": 2, "expert_parallel": 2},
    "tp2 ep4 etp1": {"tensor_parallel": 2, "expert_parallel": 4, "expert_tensor_parallel": 1},
    "pp2 vpp2 ep2": {"pipeline_parallel": 2, "virtual_pipeline": 2, "expert_parallel": 2},
    "pp2 ep2": {"pipeline_parallel": 2, "expert_parallel": 2},
}


def random_dir(
    model_dir: Callable[..., str], family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **options: Any
) -> str:
    """A directory of random weights, the same for the same arguments; "tied" is qwen3 with tied embeddings.

    A new model's norms are ones and its biases zeros, which would not show which is which.
    """
    options["tie_word_embeddings"] = family == "tied"
    source = model_dir("qwen3" if family == "tied" else family, **options)
    path = Path(f"{source}-{seed}-{dtype}")
    if not path.exists():
        shutil.copytree(source, path)
        generator = torch.Generator().manual_seed(seed)
        new = {name: torch.randn(each.shape, generator=generator).to(dtype) for name, each in saved(source).items()}
        save(path, new)
    return str(path)


def saved(path: str | Path) -> Tensors:
    return load_file(Path(path, "model.safetensors"))


def save(path: str | Path, tensors: Tensors) -> None:
    save_file(tensors, Path(path, "model.safetensors"), {"format": "pt"})


@attrs.define(eq=False)
class Built:
    """One rank's part of a model, its parameters filled with NaN."""

    weights: Any
    parameters: Tensors

    def unchanged(self) -> bool:
        return all(bool(each.isnan().all()) for each in self.parameters.values())


class _User:
    """Of megatron's process groups."""


@contextmanager
def built(
    path: str,
    sizes: str,
    *,
    value_head: bool = False,
    rebuild: Callable[[Any], list[Any]] = lambda chunks: chunks,
    **options: Any,
) -> Iterator[Built]:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from manymesh_megatron.config import MegatronConfig
    from manymesh_megatron.groups import close_groups, open_groups
    from manymesh_megatron.model import build_chunks, transformer_config
    from manymesh_megatron.runtime import Runtime
    from manymesh_megatron.weights import MegatronWeights

    config = MegatronConfig(model=path, trainable=False, **SIZES[sizes], **options).on("cpu")
    runtime, facts = Runtime.choose(config, "cpu"), ModelFacts.read(path)
    with runtime.scope():
        open_groups(user := _User(), config)
        try:
            model_parallel_cuda_manual_seed(0)
            transformer = transformer_config(config, facts, runtime)
            chunks = rebuild(build_chunks(config, transformer, facts, runtime, value_head=value_head))
            parameters = {f"{i}.{k}": p.detach() for i, chunk in enumerate(chunks) for k, p in chunk.named_parameters()}
            for each in parameters.values():
                each.fill_(torch.nan)
            groups = ProcessGroupCollection.use_mpu_process_groups()
            yield Built(MegatronWeights(chunks, transformer, facts, groups, value_head=value_head), parameters)
        finally:
            close_groups(user)


def differing(have: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor]) -> list[str]:
    """Names that are only on one side, or whose tensors differ in a bit, a shape or a dtype."""
    both = have.keys() & want.keys()
    return [
        *sorted(have.keys() ^ want.keys()),
        *(name for name in both if have[name].dtype != want[name].dtype or not torch.equal(have[name], want[name])),
    ]
