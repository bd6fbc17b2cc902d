"""What to construct on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from core.dispatch import method_specs


@attrs.frozen(init=False)
class RayClassWithInitArgs:
    """A worker class and what to construct it with on every rank.

    Attributes:
        roles: of colocated workers each role's class; else none.
    """

    cls: type
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = attrs.field(factory=dict)
    roles: Mapping[str, RayClassWithInitArgs] = attrs.field(factory=dict)

    def __init__(self, cls: type, *args: Any, **kwargs: Any) -> None:
        self.__attrs_init__(cls, args, kwargs)

    def methods(self) -> dict[str, Callable[..., Any]]:
        """What its workers can be told to run: `method`, and `role.method` of roles."""
        methods = {name: function for name, (_, function) in method_specs(self.cls).items()}
        for role, build in self.roles.items():
            methods |= {f"{role}.{name}": function for name, function in build.methods().items()}
        return methods

    @classmethod
    def with_roles(cls, holder: type, roles: Mapping[str, RayClassWithInitArgs]) -> RayClassWithInitArgs:
        """A worker that is constructed with its roles, and holds one worker for each."""
        build = cls.__new__(cls)
        build.__attrs_init__(holder, (dict(roles),), {}, dict(roles))
        return build
