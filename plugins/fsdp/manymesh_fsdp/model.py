"""From a Hugging Face directory to a model sharded over a mesh, its weights read once."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM

from core.errors import Refused
from core.manifest import ModelFacts
from manymesh.parts.agreement import on_first_rank
from manymesh.parts.pretrained import MEND, load_causal_lm
from manymesh_fsdp.config import FsdpConfig
from manymesh_fsdp.plan import plan


def load_sharded(config: FsdpConfig, mesh: DeviceMesh, device: torch.device) -> torch.nn.Module:
    """Collective: a causal LM with its weights, sharded over `mesh`. Only rank 0 reads the directory.

    On one rank without mixed precision it is a plain model, without FSDP modules.

    Raises:
        Refused: on all ranks, where the directory holds no model that transformers can load, or lacks weights.
    """
    group = mesh.get_group()
    hf_config = on_first_rank(group, lambda: _read_config(config, mesh.size()))
    model = _empty_model(config, hf_config)
    model.requires_grad_(config.trainable)
    model.eval()
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    _shard(model, config, mesh)
    source: list[torch.nn.Module] = []
    on_first_rank(group, lambda: source.append(load_causal_lm(config.model, config.dtype)))
    model.to_empty(device=device)
    if not fsdp_modules(model):
        model.tie_weights()  # to_empty gives plain parameters that were one a memory each; sharded ones stay one
    _fill(model, source[0] if source else None, group, device)
    sharded: torch.nn.Module = model
    return sharded


def fsdp_modules(model: torch.nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def drop_gradients(model: Any) -> None:
    """Bring the model back to where a pass may begin, after one that failed between micro-batches.

    Gradients of micro-batches that were not reduced yet sit on full parameters, where neither `zero_grad` nor
    `reset_iter_state` sees them: they would join the next step's. torch has no public way to drop them.
    """
    if hasattr(model, "reset_iter_state"):  # torch 2.13
        model.reset_iter_state()
    for module in fsdp_modules(model):
        state: Any = module._get_fsdp_state()
        for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
            for sharded in group.fsdp_params if group else ():
                sharded.unsharded_accumulated_grad = None
                if hasattr(sharded, "_unsharded_param"):
                    sharded._unsharded_param.grad = None
        module.reshard()
        module.set_requires_gradient_sync(True)
        module.set_is_last_backward(True)
    model.zero_grad(set_to_none=True)  # last: only now are the model's parameters the shards again


def copy_full(into: torch.Tensor, full: torch.Tensor) -> None:
    """Write a full tensor, the same on every rank, into a parameter or buffer. Not collective."""
    with torch.no_grad():
        if isinstance(into, DTensor):
            # src_data_rank=None: each rank cuts its own shard from the tensor that it has.
            shard = distribute_tensor(full.to(into.dtype), into.device_mesh, into.placements, src_data_rank=None)
            into.to_local().copy_(shard.to_local())
        else:
            into.copy_(full)


def _read_config(config: FsdpConfig, world_size: int) -> Any:
    plan(config, world_size, ModelFacts.read(config.model))
    try:
        return AutoConfig.from_pretrained(config.model)
    except Exception as error:  # the other ranks wait for the answer, so any reason must reach them
        raise Refused(
            f"transformers cannot read the config of {config.model!r}",
            have=f"{type(error).__name__}: {error}",
            where=config.model,
            mend=MEND,
        ) from error


def _empty_model(config: FsdpConfig, hf_config: Any) -> Any:
    """On meta: no rank ever holds the whole model but rank 0, which reads it."""
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                hf_config, dtype=getattr(torch, config.dtype), attn_implementation=config.attn_implementation
            )
    except (ValueError, ImportError) as error:  # no causal LM, or an attention that isn't installed; on all ranks alike
        raise Refused(
            f"transformers cannot build a causal LM from {config.model!r}",
            have=error,
            where=config.model,
            mend="choose another model, or another attn_implementation",
        ) from error


def _decoder_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The blocks that repeat: what transformers calls unsplittable, else the longest ModuleList."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    blocks = [block for each in lists for block in each if type(block).__name__ in names]
    return blocks or max((list(each) for each in lists), key=len, default=[])


def _shard(model: torch.nn.Module, config: FsdpConfig, mesh: DeviceMesh) -> None:
    if mesh.size() == 1 and {config.compute_dtype, config.reduce_dtype} <= {None, config.dtype}:
        return  # nothing to shard and nothing to cast: fully_shard would only copy every parameter, every pass
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, config.compute_dtype) if config.compute_dtype else None,
        reduce_dtype=getattr(torch, config.reduce_dtype or config.dtype),
    )
    reshard = config.reshard_after_forward
    for layer in _decoder_layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    # The root holds embeddings, head and last norm in one group, so tied ones are sharded as one. Its full parameters
    # are kept after forward, since backward begins with them.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    if mesh.size() > 1:
        # Gradients are summed, not averaged. The forced sum spares gloo a reduction that it doesn't have.
        for module in fsdp_modules(model):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _fill(model: torch.nn.Module, source: torch.nn.Module | None, group: Any, device: torch.device) -> None:
    """Rank 0's parameters and buffers to all, and buffers that no checkpoint holds: after meta they are garbage."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    originals = {**dict(source.named_parameters()), **dict(source.named_buffers())} if source is not None else {}
    for name, tensor in tensors.items():
        if source is not None:
            full = originals.pop(name).detach().to(device, tensor.dtype)
        else:
            full = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        if dist.get_world_size(group) > 1:
            dist.broadcast(full, group=group, group_src=0)
        copy_full(tensor, full)
