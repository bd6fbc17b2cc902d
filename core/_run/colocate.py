"""Several workers in the process of each rank: they share its device, its torch.distributed world and its memory.

    both = create_colocated_worker_cls({"actor": RayClassWithInitArgs(Actor), "critic": RayClassWithInitArgs(Critic)})
    group = RayWorkerGroup(pool, both)
    roles = group.spawn()
    roles["actor"].update(batch)

A role's methods and meshes are addressed as `role.name`. No name in Python holds a dot, so two roles can't be mixed up.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from core._run.build import RayClassWithInitArgs
from core.errors import Refused
from core.mesh import Mesh
from core.worker import Worker


class ColocatedWorker(Worker):
    """A rank's workers by role, made in the order given and shut down in the opposite one."""

    def __init__(self, roles: Mapping[str, RayClassWithInitArgs]) -> None:
        self.workers = {role: worker.cls(*worker.args, **worker.kwargs) for role, worker in roles.items()}

    def __getattr__(self, name: str) -> Any:
        role, dot, method = name.partition(".")
        if not dot:
            raise AttributeError(name)
        return getattr(self.workers[role], method)

    def mesh(self, name: str) -> Mesh:
        role, _, mesh = name.partition(".")
        inner: Mesh = self.workers[role].mesh(mesh)
        return inner

    def shutdown(self) -> None:
        with ExitStack() as stack:  # all of them, whatever one raises
            for worker in self.workers.values():
                if hasattr(worker, "shutdown"):
                    stack.callback(worker.shutdown)


def create_colocated_worker_cls(class_dict: Mapping[str, RayClassWithInitArgs]) -> RayClassWithInitArgs:
    """One worker that holds others, by role: what to give a group, whose `spawn` then gives a group for each role.

    Raises:
        Refused: no roles, a role is no identifier, or holds roles itself.
    """
    wrong = [role for role in class_dict if not role.isidentifier()]
    if not class_dict or wrong:
        raise Refused(
            "colocated workers have roles, each named by an identifier", have=wrong or "none", want='{"actor": ...}'
        )
    if owners := [role for role, worker in class_dict.items() if worker.roles]:
        raise Refused("a role cannot hold colocated workers itself", have=owners, mend="give all roles in one dict")
    return RayClassWithInitArgs.with_roles(ColocatedWorker, class_dict)
