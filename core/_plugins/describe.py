"""The options of a config class, with types, defaults and the help that its sources give."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any, get_type_hints

import attrs


@attrs.frozen
class Option:
    """An option of a backend, as users write it: nested ones with dots."""

    name: str
    type: str
    default: str | None  # as Python; None: it must be given
    help: str


def options(cls: Any, prefix: str = "") -> Iterator[Option]:
    """The options of an attrs class. Their help is what its sources say: in the docstring under "Attributes:", or in a
    comment behind the field."""
    hints = get_type_hints(cls)
    helps: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        helps |= _comments(base) | _attributes(base.__doc__ or "")
    for field in attrs.fields(cls):
        hint, default = hints[field.name], field.default
        if isinstance(default, attrs.Factory) and not default.takes_self:  # type: ignore[arg-type]
            default = default.factory()
        if attrs.has(hint):
            yield from options(hint, f"{prefix}{field.name}.")
        else:
            text = None if default is attrs.NOTHING else repr(default)
            type_text = re.sub(r"\b(collections\.abc|typing)\.", "", inspect.formatannotation(hint))
            yield Option(prefix + field.name, type_text, text, helps.get(field.name, ""))


def _comments(cls: type) -> dict[str, str]:
    try:
        source = inspect.getsource(cls)
    except (OSError, TypeError):  # installed without sources
        return {}
    return dict(re.findall(r"^ +(\w+):[^\n]*?  # (.+)$", source, re.MULTILINE))


def _attributes(docstring: str) -> dict[str, str]:
    """Help by name, from the lines under "Attributes:". The section ends where the indent of its first line does."""
    body = re.search(r"^ *Attributes:\n(( *)[\w, ]+: (?:.*\n?(?:\2.*|\s*)\n?)*)", docstring, re.MULTILINE)
    if body is None:
        return {}
    texts = re.findall(rf"^{body[2]}([\w, ]+): (.*(?:\n{body[2]} +.*)*)", body[1], re.MULTILINE)
    return {name: " ".join(text.split()) for names, text in texts for name in names.split(", ")}
