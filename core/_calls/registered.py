"""The registered methods of a class."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from core._calls.call import MethodSpec
from core.errors import Refused

SPEC = "__manymesh_spec__"  # the attribute of a function that holds what register says of it


def method_specs(cls: type) -> dict[str, tuple[MethodSpec, Callable[..., Any]]]:
    """The registered methods of a class, with the function that will run.

    An override without the decorator keeps the spec of what it overrides. Nothing is evaluated: a property that raises
    does no harm.
    """
    specs: dict[str, tuple[MethodSpec, Callable[..., Any]]] = {}
    for base in reversed(cls.__mro__):
        for name, value in vars(base).items():
            spec = getattr(getattr(value, "__func__", value), SPEC, None)
            if spec is not None and not inspect.isfunction(value):
                raise Refused(
                    f"{cls.__name__}.{name} cannot be registered",
                    have=f"a {type(value).__name__}",
                    want="a method of an instance, or a coroutine method",
                )
            if spec is None and name in specs and inspect.isfunction(value):
                spec = specs[name][0]
            if spec is not None:
                specs[name] = spec, value
            else:
                specs.pop(name, None)  # overridden by something that is no method
    return specs
