"""Packages whose names are imported at first use."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

PACKAGE = """
from typing import TYPE_CHECKING

from core.lazy import lazy_names

if TYPE_CHECKING:
    from lazily.square import Square as Square
    from lazily.circle import Round as Circle
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
"""


@pytest.fixture
def lazily(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A package with two lazy names."""
    (tmp_path / "lazily").mkdir()
    (tmp_path / "lazily/__init__.py").write_text(PACKAGE)
    (tmp_path / "lazily/square.py").write_text("class Square: pass")
    (tmp_path / "lazily/circle.py").write_text("class Round: pass")
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("lazily")
    for name in [name for name in sys.modules if name.partition(".")[0] == "lazily"]:
        del sys.modules[name]


def test_a_name_imports_its_module_when_it_is_first_used(lazily: Any) -> None:
    assert "lazily.circle" not in sys.modules
    circle = lazily.Circle
    assert circle is sys.modules["lazily.circle"].Round
    assert "lazily.square" not in sys.modules
    assert vars(lazily)["Circle"] is circle


def test_the_names_are_listed_before_they_are_imported(lazily: Any) -> None:
    assert lazily.__all__ == ["Circle", "Square"]
    assert {"Circle", "Square", "__name__"} <= set(dir(lazily))
    assert "lazily.square" not in sys.modules
    with pytest.raises(AttributeError, match="module 'lazily' has no attribute 'Sqare'"):
        lazily.Sqare  # noqa: B018


@pytest.mark.parametrize("package", ["core", "manymesh.workers", "sdk.conformance"])
def test_every_name_that_our_packages_list_is_there(package: str) -> None:
    module = importlib.import_module(package)
    assert module.__all__
    for name in module.__all__:
        assert getattr(module, name) is getattr(module, name)
