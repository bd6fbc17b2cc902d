"""RayWorkerGroup: a WorkerGroup on a pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from core._plugins.shadow import check_packages
from core.group import Observer, RayClassWithInitArgs, W, WorkerGroup
from core.transport.ray.actors import RayTransport
from core.transport.ray.environment import LEAVE_VISIBLE, checked_python, checked_variables
from core.transport.ray.pool import RayResourcePool, need_ray


class RayWorkerGroup(WorkerGroup[W]):
    """One Ray actor a rank, filling a pool.

    Args:
        resource_pool: where the actors run; placed now if it is not yet.
        ray_cls_with_init: the class to construct on each rank, or a RayClassWithInitArgs.
        args: of its constructor; keyword arguments are given by a RayClassWithInitArgs, since keywords are the group's.
        name: for errors; the class's name when not given.
        env: environment variables of the actors' processes.
        all_devices_visible: each process sees all accelerators of its node and uses its own, which engines need whose
            ranks address each other's devices by number. False: it sees its own alone.
        python: interpreter of the environment that the actors run in, on all nodes; None for the driver's own.
        timeout_s: deadline of a call that declares none, seconds.
        start_timeout_s: deadline of start and construction, seconds.
        observers: are told of every call; see Observer.

    Raises:
        Refused: the pool cannot be placed, a method has a reserved name, `env` has variables that the group sets,
            `python` has not the versions that it must share with the driver (see docs/driver.md), or all constructors
            refused.
        DeadlineExceeded: the processes did not start in time.
        WorkerFailed: a constructor raised; all processes have been ended.
    """

    def __init__(
        self,
        resource_pool: RayResourcePool,
        ray_cls_with_init: type[W] | RayClassWithInitArgs[W],
        *args: Any,
        name: str | None = None,
        env: Mapping[str, str] | None = None,
        all_devices_visible: bool = False,
        python: str | None = None,
        timeout_s: float = 7200.0,
        start_timeout_s: float = 300.0,
        observers: Sequence[Observer] = (),
    ) -> None:
        need_ray()
        check_packages()  # a user's folder named core would be what the workers import
        build = RayClassWithInitArgs.of(ray_cls_with_init, args)
        name, methods = name or build.cls.__name__, build.methods()
        python = checked_python(python) if python is not None else None
        variables = checked_variables(env or {}) | (LEAVE_VISIBLE if all_devices_visible else {})
        transport = RayTransport(resource_pool, name, methods, variables, start_timeout_s, python)
        super().__init__(
            transport, build, name=name, timeout_s=timeout_s, start_timeout_s=start_timeout_s, observers=observers
        )
