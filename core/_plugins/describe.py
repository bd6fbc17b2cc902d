"""One backend in full: what it offers, its options, what it requires, and whether that is met. Imports no backend."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any, get_type_hints

import attrs

from core._plugins.discovery import Entry, requirements
from core.errors import RegistryError
from core.registry import load


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
    for each in reversed(cls.__mro__[:-1]):
        helps |= _comments(each) | _attributes(each)
    for field in attrs.fields(cls):
        hint, default = hints[field.name], field.default
        if isinstance(default, attrs.Factory) and not default.takes_self:  # type: ignore[arg-type]
            default = default.factory()
        if attrs.has(hint):
            yield from options(hint, f"{prefix}{field.name}.")
        else:
            shown = None if default is attrs.NOTHING else repr(default)
            text = re.sub(r"\b(collections\.abc|typing)\.", "", inspect.formatannotation(hint))
            yield Option(prefix + field.name, text, shown, helps.get(field.name, ""))


def _comments(cls: type) -> dict[str, str]:
    try:
        source = inspect.getsource(cls)
    except (OSError, TypeError):  # installed without sources
        return {}
    return dict(re.findall(r"^    (\w+):[^\n]*?  # (.+)$", source, re.MULTILINE))


def _attributes(cls: type) -> dict[str, str]:
    section = re.split(r"\n(?=\S)", inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")[2])[0]
    found = re.findall(r"^ {4}([\w, ]+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for names, text in found for name in names.split(", ")}


def describe(entry: Entry) -> dict[str, Any]:
    """What the listing's JSON has of an entry beyond the table: see its keys. Without a manifest, nothing."""
    manifest = entry.manifest
    if manifest is None:
        return {}
    found, problem = None, ""
    if manifest.config is not None:
        try:
            found = [attrs.asdict(option) for option in options(load(entry, "config"))]
        except (RegistryError, attrs.exceptions.NotAnAttrsClassError, NameError) as error:
            problem = str(error)
    needs = [{"any_of": list(group), "have": have, "met": met} for group, have, met in requirements(manifest)]
    return {
        "summary": manifest.summary,
        "vendors": sorted(manifest.vendors),
        "requires": needs,
        "environment": manifest.env or sys.prefix,
        "config": manifest.config,
        "planner": manifest.planner,
        "options": found,
        "options_error": problem,
    }
