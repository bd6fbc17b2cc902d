"""Packages whose public names are imported when they are first used, and are typed as if they were there.

A package writes its names once, as imports under `if TYPE_CHECKING:`. Type checkers and editors read these; at run time
`lazy_names` reads them too:

    if TYPE_CHECKING:
        from package.shape import Circle as Circle
    else:
        __getattr__, __dir__, __all__ = lazy_names(__name__)
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package, from the imports under its `if TYPE_CHECKING:`.

    Args:
        package: its `__name__`.
    """
    homes = typed_imports(package)

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, original = homes[name]
        value = getattr(importlib.import_module(module), original)
        setattr(sys.modules[package], name, value)  # the next time it is there
        return value

    names = sorted(homes)
    return get, lambda: sorted({*vars(sys.modules[package]), *names}), names


def typed_imports(package: str) -> dict[str, tuple[str, str]]:
    """The imports under a package's `if TYPE_CHECKING:`, in the order of the file: module and name of each."""
    homes: dict[str, tuple[str, str]] = {}
    for block in ast.parse(inspect.getsource(sys.modules[package])).body:
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING":
            for line in block.body:
                if isinstance(line, ast.ImportFrom) and line.module:
                    homes |= {alias.asname or alias.name: (line.module, alias.name) for alias in line.names}
    return homes
