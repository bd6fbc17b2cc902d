"""What to construct on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

import attrs

from core._calls.registered import method_specs
from core.errors import Refused

P = ParamSpec("P")
if TYPE_CHECKING:
    import typing_extensions

    W = typing_extensions.TypeVar("W", default=Any)
else:
    W = TypeVar("W")


@attrs.frozen(init=False)
class RayClassWithInitArgs(Generic[W]):
    """A worker class and what to construct it with on every rank.

    Attributes:
        roles: of colocated workers each role's class; else none.
    """

    cls: type[W]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = attrs.field(factory=dict)
    roles: Mapping[str, RayClassWithInitArgs[Any]] = attrs.field(factory=dict)

    def __init__(self, cls: Callable[P, W], *args: P.args, **kwargs: P.kwargs) -> None:
        self.__attrs_init__(cls, args, kwargs)  # type: ignore[arg-type]

    @classmethod
    def of(cls, worker: type[W] | RayClassWithInitArgs[W], args: tuple[Any, ...]) -> RayClassWithInitArgs[W]:
        """A worker class with its arguments, or one that already has them.

        Raises:
            Refused: it already has them, and there are more.
        """
        if not isinstance(worker, RayClassWithInitArgs):
            return RayClassWithInitArgs(worker, *args)
        if args:
            raise Refused(
                f"{worker.cls.__name__} already has its arguments",
                have=f"{len(args)} more",
                mend="give them to RayClassWithInitArgs, or the class itself to the group; world_size is a keyword",
            )
        return worker

    def methods(self) -> dict[str, Callable[..., Any]]:
        """What its workers can be told to run: `method`, and `role.method` of roles."""
        methods = {name: function for name, (_, function) in method_specs(self.cls).items()}
        for role, build in self.roles.items():
            methods |= {f"{role}.{name}": function for name, function in build.methods().items()}
        return methods

    @classmethod
    def with_roles(cls, holder: type[W], roles: Mapping[str, RayClassWithInitArgs[Any]]) -> RayClassWithInitArgs[W]:
        """A worker that is constructed with its roles, and holds one worker for each."""
        build = cls.__new__(cls)
        build.__attrs_init__(holder, (dict(roles),), {}, dict(roles))
        return build
