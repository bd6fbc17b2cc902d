"""megatron's process groups. It keeps them in globals of the process, so all engines in one process share a layout."""

from __future__ import annotations

import weakref
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from core.errors import Refused
from manymesh_megatron.config import MegatronConfig
from manymesh_megatron.environment import restore_variables, set_variables

Sizes = tuple[Any, ...]
_users: weakref.WeakKeyDictionary[Any, Sizes] = weakref.WeakKeyDictionary()  # who uses megatron's globals, and as what


def sizes(config: MegatronConfig) -> Sizes:
    """What two engines have in common where the same rank has the same place in both."""
    return (
        config.tensor_parallel,
        config.pipeline_parallel,
        config.virtual_pipeline,
        config.context_parallel,
        config.expert_parallel,
        config.expert_tensor_size,
        config.order,
    )


def open_groups(user: Any, config: MegatronConfig) -> None:
    """Collective: make the groups of the config's layout, or join those that another engine of this process made.

    Raises:
        Refused: an engine in this process uses another layout.
    """
    layout = sizes(config)
    open_layout = next(iter(_users.values()), None)
    if open_layout is not None and open_layout != layout:
        names = "tensor, pipeline, virtual pipeline, context, expert, expert tensor, order"
        raise Refused(
            "the Megatron engines of one process share one layout, since megatron-core keeps it in globals",
            have=f"{open_layout} ({names})",
            want=layout,
            mend="give actor and reference the same sizes, or put them into groups of their own",
        )
    if open_layout is None:
        set_variables()
        destroy_groups()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=config.tensor_parallel,
            pipeline_model_parallel_size=config.pipeline_parallel,
            virtual_pipeline_model_parallel_size=config.virtual_pipeline,
            context_parallel_size=config.context_parallel,
            expert_model_parallel_size=config.expert_parallel,
            expert_tensor_parallel_size=config.expert_tensor_size,
            order=config.order,
            create_gloo_process_groups=False,
        )
    _users[user] = layout


def close_groups(user: Any) -> None:
    """The last user's leaving frees the groups, and puts the environment back."""
    if _users.pop(user, None) is not None and not _users:
        destroy_groups()
        restore_variables()


def destroy_groups() -> None:
    """Collective. megatron only forgets its groups, and each keeps threads and sockets or device memory."""
    groups = [each for each in (parallel_state._global_process_group_list or ()) if each is not None]
    parallel_state.destroy_model_parallel()
    for group in groups:
        if group != dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


def group_along(*axes: str) -> Any:
    """This rank's torch process group along axes of the dense layout.

    Raises:
        Refused: megatron has no group for these axes.
    """
    find = _GROUPS.get(frozenset(axes))
    if find is None:
        legal = sorted("-".join(sorted(each)) for each in _GROUPS)
        raise Refused("megatron has no process group along these axes", have=axes, want=legal)
    return find()


_GROUPS: dict[frozenset[str], Any] = {
    frozenset({"tp"}): parallel_state.get_tensor_model_parallel_group,
    frozenset({"pp"}): parallel_state.get_pipeline_model_parallel_group,
    frozenset({"cp"}): parallel_state.get_context_parallel_group,
    frozenset({"dp"}): parallel_state.get_data_parallel_group,
    frozenset({"dp", "cp"}): lambda: parallel_state.get_data_parallel_group(with_context_parallel=True),
    frozenset({"tp", "pp"}): parallel_state.get_model_parallel_group,
    frozenset({"tp", "cp"}): parallel_state.get_tensor_and_context_parallel_group,
}
