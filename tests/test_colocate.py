"""Several workers in one process of each rank."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from core.dispatch import Dispatch, on_mesh, register
from core.errors import Refused, WorkerFailed
from core.group import RayClassWithInitArgs, create_colocated_worker_cls
from core.transport.local import LocalWorkerGroup
from core.transport.ray import RayResourcePool, RayWorkerGroup
from core.worker import Worker
from tests.support.workers import Echo, mesh_of

ENDED: list[str] = []


class Ends(Worker):
    """Notes that it was shut down. Has a registered method `c`, or `b_c`, by subclass."""

    def __init__(self, name: str, dp_ranks: tuple[int, ...] = (0,)) -> None:
        self.name = name
        self.add_mesh("m", mesh_of(self.rank, dp_ranks, [dp_ranks.index(dp) for dp in sorted(set(dp_ranks))]))

    @register(Dispatch.RANK_ZERO)
    def pid(self) -> int:
        return os.getpid()

    @register()
    def world(self) -> tuple[int, int]:
        import torch.distributed as dist

        self.init_process_group(60)
        total = torch.ones(1)
        dist.all_reduce(total)
        return self.rank, int(total)

    @register(on_mesh("m"))
    def tag(self, batch: Any) -> Any:
        batch["by"] = torch.full((len(batch),), self.rank)
        return batch

    @register(on_mesh("m"), blocking=False)
    def later(self, batch: Any) -> Any:
        batch["x"] += 100
        return batch

    def shutdown(self) -> None:
        ENDED.append(self.name)
        if self.name == "raises":
            raise RuntimeError("at the end")


class HasBC(Ends):
    @register()
    def b_c(self, value: int) -> str:
        return f"{self.name}.b_c({value})"


class HasC(Ends):
    @register()
    def c(self, value: int) -> str:
        """Say who was reached."""
        return f"{self.name}.c({value})"

    @register()
    def fails(self) -> None:
        raise OSError("no room")


def made(cls: type, *args: Any) -> RayClassWithInitArgs:
    return RayClassWithInitArgs(cls, *args)


def local(world_size: int = 1, **roles: RayClassWithInitArgs) -> Any:
    return LocalWorkerGroup(create_colocated_worker_cls(roles), world_size=world_size, name="both")


def test_each_call_reaches_its_own_role_whatever_roles_and_methods_are_called() -> None:
    roles = local(a=made(HasBC, "a"), a_b=made(HasC, "a_b")).spawn()
    assert roles["a"].b_c(1) == ["a.b_c(1)"]
    assert roles["a_b"].c(2) == ["a_b.c(2)"]
    assert roles["a_b"].c.__doc__ == "Say who was reached."
    with pytest.raises(AttributeError, match=r"group 'both\.a' has no method 'c'"):
        roles["a"].c(1)


def test_a_roles_mesh_is_its_own_though_another_has_one_of_that_name() -> None:
    roles = local(4, wide=made(Ends, "wide", (0, 1, 2, 3)), narrow=made(Ends, "narrow", (0, 0, 1, 1))).spawn()
    batch = TensorDict({"x": torch.arange(8)}, batch_size=[8])
    assert roles["wide"].tag(batch)["by"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert roles["narrow"].tag(batch)["by"].tolist() == [0, 0, 0, 0, 2, 2, 2, 2]
    assert (roles["wide"].route("m").dp_size, roles["narrow"].route("m").dp_size) == (4, 2)
    with pytest.raises(Refused, match="HasC has no mesh named 'train'"):
        local(c=made(HasC, "c")).spawn()["c"].route("train")


def test_a_role_is_a_group_to_those_who_are_given_one() -> None:
    group = local(2, a=made(HasC, "a"), b=made(HasC, "b"))
    [role] = group.spawn(["b"]).values()
    assert isinstance(role, LocalWorkerGroup)
    assert (role.name, role.world_size, role.identities) == ("both.b", 2, group.identities)


def test_roles_live_and_fail_together() -> None:
    group = local(a=made(HasBC, "a"), b=made(HasC, "b"))
    roles = group.spawn()
    with pytest.raises(WorkerFailed, match=r"rank 0 of group 'both.b' raised OSError: no room"):
        roles["b"].fails()
    assert group.failed
    with pytest.raises(WorkerFailed, match=r"'both\.a' has failed earlier, so 'b_c' cannot run"):
        roles["a"].b_c(1)


def test_workers_are_shut_down_once_and_in_the_opposite_order_of_their_making_whatever_one_raises() -> None:
    ENDED.clear()
    roles = local(a=made(HasBC, "a"), b=made(HasC, "raises"), c=made(HasC, "c")).spawn()
    for role in roles.values():
        role.shutdown()
    assert ENDED == ["c", "raises", "a"]
    with pytest.raises(Refused, match="has been shut down"):
        roles["a"].b_c(1)


def test_what_cannot_be_colocated_is_refused() -> None:
    with pytest.raises(Refused, match="named by an identifier"):
        create_colocated_worker_cls({"a.b": made(Echo)})
    with pytest.raises(Refused, match="named by an identifier"):
        create_colocated_worker_cls({})
    inner = create_colocated_worker_cls({"a": made(Echo)})
    with pytest.raises(Refused, match="cannot hold colocated workers"):
        create_colocated_worker_cls({"b": inner})


def test_a_method_with_a_name_of_the_groups_own_is_refused_before_any_worker_is_made() -> None:
    class Bad(Worker):
        @register()
        def spawn(self) -> None: ...

    ENDED.clear()
    with pytest.raises(Refused, match="Bad registers methods under names of the group's own: spawn"):
        local(a=made(HasC, "a"), b=made(Bad))


def test_spawn_knows_its_roles() -> None:
    with pytest.raises(Refused, match=r"no such roles[\s\S]*\['critic'\]"):
        local(actor=made(HasC, "actor")).spawn(["critic"])
    with pytest.raises(Refused, match="has no roles"):
        LocalWorkerGroup(made(HasC, "alone")).spawn()


def test_on_ray_roles_share_each_ranks_process_and_world_and_hand_rows_to_each_other(ray_cluster: None) -> None:
    both = create_colocated_worker_cls({"a": made(HasBC, "a", (0, 1)), "a_b": made(HasC, "a_b", (0, 0))})
    with RayResourcePool([2], name="colocated") as pool, RayWorkerGroup(pool, both, name="both") as group:
        roles = group.spawn()
        assert roles["a"].pid() == roles["a_b"].pid() != os.getpid()
        assert roles["a"].b_c(1) == ["a.b_c(1)"] * 2
        assert roles["a_b"].c(2) == ["a_b.c(2)"] * 2
        assert roles["a"].world() == roles["a_b"].world() == [(0, 2), (1, 2)]
        batch = TensorDict({"x": torch.arange(6)}, batch_size=[6])
        future = roles["a"].later(batch)
        assert roles["a_b"].tag(future)["x"].tolist() == list(range(100, 106))
