"""What is installed, what is broken, why, and how to mend it: `python -m core.list_engines [NAME]`."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import shutil
import sys
import textwrap
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from core._plugins.describe import Option as Option
from core._plugins.describe import options as options
from core.errors import RegistryError, did_you_mean
from core.hookspecs import ENTRY_POINT_GROUP, PROJECT
from core.manifest import KINDS
from core.registry import Backend, EngineRegistry, Entry, Status

_COLOURS = {Status.OK: 32, Status.DISABLED: 2, Status.BROKEN: 31, Status.SHADOWED: 31}  # else yellow
_LEAST_TEXT = 24  # columns


def main(argv: Sequence[str] | None = None) -> int:
    """Print the listing; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m core.list_engines",
        description="List what plugins offer: engines, rollouts, transfers, dispatch modes and whatever else.",
    )
    parser.add_argument("name", nargs="?", help="show it in full: a backend, distribution:backend, or distribution")
    parser.add_argument("--json", action="store_true", help="print JSON (schema 1) instead of a table")
    parser.add_argument("--kind", help=f"only one kind ({', '.join(KINDS)}, ...), and plugins whose kind is unknown")
    parser.add_argument("--verbose", action="store_true", help="also capabilities, requirements, factory and config")
    parser.add_argument("--strict", action="store_true", help="exit 1 when anything but what is disabled is not ok")
    args = parser.parse_args(argv)

    with contextlib.redirect_stdout(sys.stderr):  # a plugin that prints at import must not spoil the JSON
        registry = EngineRegistry.discover()
        kinds = {*KINDS, *(entry.kind for entry in registry.entries if entry.kind)}
        if args.kind is not None and args.kind not in kinds:
            parser.error(f"no kind {args.kind!r}; {did_you_mean(args.kind, kinds)}")
        entries = [entry for entry in registry.entries if args.kind is None or entry.kind in (args.kind, None)]
        if args.name is not None:
            try:
                entries = registry.named(args.name, args.kind)
            except RegistryError as error:
                print(error, file=sys.stderr)
                return 2
        rows = [as_dict(entry, in_full=args.name is not None) for entry in entries]
    if args.json:
        import json

        print(json.dumps({"schema": 1, "entries": rows}, indent=2))
    elif args.name is not None:
        print("\n\n".join("\n".join(_in_full(*pair)) for pair in zip(entries, rows, strict=True)))
    elif entries:
        header = ("kind", "name", "status", "distribution", "devices", "")
        colours = [_COLOURS.get(entry.status, 33) for entry in entries]
        print("\n".join(_table([header, *(_row(entry, args.verbose) for entry in entries)], [None, *colours])))
    else:
        print(_nothing(args.kind))
    healthy = all(entry.status in (Status.OK, Status.DISABLED) for entry in entries)
    return 0 if healthy or not args.strict else 1


def as_dict(entry: Entry, in_full: bool = False) -> dict[str, Any]:
    """An entry as the JSON listing shows it. What only a manifest knows is empty or None where there is none.

    Args:
        in_full: with what the listing of one name has beyond the table, where there is a manifest.
    """
    manifest = entry.manifest if isinstance(entry, Backend) else None
    plain = {
        "name": entry.name,
        "kind": entry.kind,
        "status": str(entry.status),
        "distribution": entry.distribution,
        "version": entry.version,
        "reason": entry.reason or _note(entry),
        "mend": entry.mend,
        "devices": sorted(manifest.devices) if manifest else [],
        "model_types": sorted(manifest.model_types) if manifest else [],
        "capabilities": sorted(map(str, manifest.capabilities)) if manifest else [],
        "factory": str(manifest.factory) if manifest else None,
    }
    if not in_full or not isinstance(entry, Backend):
        return plain
    config_options, problem = None, ""
    if entry.manifest.config is not None:
        try:
            config_options = [attrs.asdict(option) for option in options(entry.load("config"))]
        except (RegistryError, attrs.exceptions.NotAnAttrsClassError, NameError) as error:
            problem = str(error)
    return plain | {
        "summary": entry.manifest.summary,
        "vendors": sorted(entry.manifest.vendors),
        "requires": [attrs.asdict(need) for need in entry.needs()],
        "config": entry.manifest.config and str(entry.manifest.config),
        "planner": entry.manifest.planner and str(entry.manifest.planner),
        "memory": entry.manifest.memory and str(entry.manifest.memory),
        "options": config_options,
        "options_error": problem,
    }


def _note(entry: Entry) -> str:
    """What is worth a remark of a backend that can be used."""
    if entry.kind is None or entry.kind in KINDS:
        return ""
    return f"nothing in {PROJECT} asks for a backend of this kind"


def _in_full(entry: Entry, facts: dict[str, Any]) -> Iterator[str]:
    """One backend as text: what it is, then its options, one a line."""
    yield f"{entry.kind or 'plugin'} {entry.name}: {facts.get('summary') or entry.reason}"
    yield f"  distribution: {entry.distribution} {entry.version}".rstrip()
    yield from (f"  {key}: {facts[key]}" for key in ("status", "reason", "mend") if facts[key])
    yield from (f"  {line}" for line in _details(entry))
    if not isinstance(entry, Backend):
        return
    if not facts["options"]:
        yield f"  options: {facts['options_error'] or 'none'}"
        return
    yield "  options:"
    defaults = ["required" if o["default"] is None else f"= {o['default']}" for o in facts["options"]]
    rows = [(o["name"], o["type"], default, o["help"]) for o, default in zip(facts["options"], defaults, strict=True)]
    yield from (f"    {line}" for line in _table(rows))


def _row(entry: Entry, verbose: bool) -> tuple[str, ...]:
    manifest = entry.manifest if isinstance(entry, Backend) else None
    text = [entry.reason or (manifest.summary if manifest else ""), _note(entry)]
    text += [f"mend: {entry.mend}"] if entry.mend else []
    text += _details(entry) if verbose else []
    distribution = f"{entry.distribution} {entry.version}".rstrip()
    devices = ", ".join(sorted(manifest.devices)) if manifest else ""
    return entry.kind or "?", entry.name, str(entry.status), distribution, devices, "\n".join(filter(None, text))


def _details(entry: Entry) -> list[str]:
    if not isinstance(entry, Backend):
        trace = traceback.format_exception(entry.error) if entry.error else []
        return [f"module: {entry.module}", *"".join(trace).splitlines()]
    manifest = entry.manifest
    lines = [
        f"devices: {', '.join(sorted(manifest.devices))}",
        f"model types: {', '.join(sorted(manifest.model_types))}",
        f"capabilities: {', '.join(sorted(manifest.capabilities)) or 'none'}",
    ]
    for need in entry.needs():
        lines.append(f"requires: {' or '.join(need.any_of)}: {'met' if need.met else 'NOT MET'} ({need.installed})")
    lines += [f"factory: {manifest.factory}", f"config: {manifest.config or 'none'}"]
    return [*lines, *(f"{name}: {getattr(manifest, name) or 'none'}" for name in ("planner", "memory"))]


def _table(rows: Sequence[Sequence[str]], colours: Sequence[int | None] = ()) -> Iterator[str]:
    """Rows in columns, of which the last is text. On a terminal that text is folded to its width, and the third column
    has colours; in a pipe or file a line stays one line."""
    on_terminal = sys.stdout.isatty()
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    indent = sum(widths) + 2 * len(widths)
    space = max(shutil.get_terminal_size().columns - indent, _LEAST_TEXT)
    for number, (*cells, text) in enumerate(rows):
        padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        if on_terminal and "NO_COLOR" not in os.environ and colours and colours[number] is not None:
            padded[2] = f"\x1b[{colours[number]}m{cells[2]}\x1b[0m" + padded[2][len(cells[2]) :]
        lines = text.split("\n")
        if on_terminal:
            lines = [part for line in lines for part in textwrap.wrap(line, space, break_on_hyphens=False) or [""]]
        yield f"{'  '.join(padded)}  {lines[0]}".rstrip()
        yield from (" " * indent + line for line in lines[1:])


def _nothing(kind: str | None) -> str:
    """How to come to a plugin. The distribution's extras name the ones that are published with it."""
    what = f"A plugin is a distribution with an entry point in the group {ENTRY_POINT_GROUP!r}."
    if kind:
        return f"No plugin that offers a {kind} is installed.\n{what}"
    try:
        extras = ",".join(importlib.metadata.metadata(PROJECT).get_all("Provides-Extra") or ())
    except importlib.metadata.PackageNotFoundError:
        extras = ""
    install = f"pip install '{PROJECT}[{extras}]'" if extras else f"pip install a plugin, e.g. {PROJECT}-<name>"
    return f"No plugin is installed. To have one:\n  {install}\n{what}"


if __name__ == "__main__":
    sys.exit(main())
