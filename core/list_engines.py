"""What is installed, what is broken, why, and how to mend it: `python -m core.list_engines [NAME]`."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from core._plugins.describe import Option as Option
from core._plugins.describe import describe
from core._plugins.describe import options as options
from core.errors import did_you_mean
from core.hookspecs import ENTRY_POINT_GROUP, PROJECT
from core.manifest import KINDS
from core.registry import EngineRegistry, Entry, Status

_STYLES = {Status.OK: "green", Status.DISABLED: "dim", Status.BROKEN: "red", Status.SHADOWED: "red"}  # else yellow


def main(argv: Sequence[str] | None = None) -> int:
    """Print the listing; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m core.list_engines", description="List the engines, rollouts and transfers that are installed."
    )
    parser.add_argument(
        "name", nargs="?", help="show this one in full: a backend, distribution:backend, or distribution"
    )
    parser.add_argument("--json", action="store_true", help="print JSON (schema 1) instead of a table")
    parser.add_argument("--kind", choices=KINDS, help="only backends of one kind, and plugins whose kind is unknown")
    parser.add_argument("--verbose", action="store_true", help="also capabilities, requirements, factory and config")
    parser.add_argument("--strict", action="store_true", help="exit 1 when anything but what is disabled is not ok")
    args = parser.parse_args(argv)

    with contextlib.redirect_stdout(sys.stderr):  # a plugin that prints at import must not spoil the JSON
        found = EngineRegistry.discover().entries
    entries = [entry for entry in found if args.kind is None or entry.kind in (args.kind, None)]
    full = {}
    if args.name is not None:
        names = {each for entry in entries for each in _names(entry)}
        entries = [entry for entry in entries if args.name in _names(entry)]
        if not entries:
            print(f"no plugin {args.name!r} is installed; {did_you_mean(args.name, names)}", file=sys.stderr)
            return 2
        with contextlib.redirect_stdout(sys.stderr):
            full = {id(entry): describe(entry) for entry in entries}
    if args.json:
        import json

        listed = [as_dict(entry) | full.get(id(entry), {}) for entry in entries]
        print(json.dumps({"schema": 1, "entries": listed}, indent=2))
    elif full:
        print("\n\n".join(_in_full(entry, full[id(entry)]) for entry in entries))
    elif entries:
        _print_table(entries, args.verbose)
    else:
        print(_nothing(args.kind))
    healthy = all(entry.status in (Status.OK, Status.DISABLED) for entry in entries)
    return 0 if healthy or not args.strict else 1


def as_dict(entry: Entry) -> dict[str, Any]:
    """An entry as the JSON listing shows it. What only a manifest knows is empty or None where there is none."""
    manifest = entry.manifest
    return {
        "name": entry.name,
        "kind": entry.kind,
        "status": str(entry.status),
        "distribution": entry.distribution,
        "version": entry.version,
        "reason": entry.reason,
        "mend": entry.mend,
        "devices": sorted(manifest.devices) if manifest else [],
        "model_types": sorted(manifest.model_types) if manifest else [],
        "capabilities": sorted(map(str, manifest.capabilities)) if manifest else [],
        "factory": manifest.factory if manifest else None,
    }


def _names(entry: Entry) -> tuple[str, ...]:
    return entry.name, f"{entry.distribution}:{entry.name}", entry.distribution


def _in_full(entry: Entry, more: dict[str, Any]) -> str:
    """One backend as text: what it is, then its options, one a line."""
    has = as_dict(entry)
    lines = [f"{entry.kind or 'plugin'} {entry.name}: {more.get('summary') or entry.reason}"]
    lines += [f"  distribution: {entry.distribution} {entry.version}".rstrip(), f"  status: {entry.status}"]
    lines += [f"  {key}: {has[key]}" for key in ("reason", "mend") if has[key]]
    if entry.manifest is None:
        return "\n".join([*lines, *(f"  {line}" for line in _details(entry))])
    lines += [f"  {key.replace('_', ' ')}: {', '.join(has[key])}" for key in ("devices", "model_types")]
    lines += [f"  capabilities: {', '.join(has['capabilities']) or 'none'}"]
    for need in more["requires"]:
        have = ", ".join(f"{name} {version or 'not installed'}" for name, version in need["have"].items())
        lines.append(f"  requires: {' or '.join(need['any_of'])}: {'met' if need['met'] else 'NOT MET'} ({have})")
    lines += [f"  {key}: {value}" for key in ("environment", "config", "planner") if (value := more[key])]
    lines += [f"  factory: {entry.manifest.factory}"]
    if not more["options"]:
        return "\n".join([*lines, f"  options: {more['options_error'] or 'none'}"])
    given = ["required" if o["default"] is None else f"= {o['default']}" for o in more["options"]]
    rows = [(o["name"], o["type"], default) for o, default in zip(more["options"], given, strict=True)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    shown = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    helps = [option["help"] for option in more["options"]]
    return "\n".join([*lines, "  options:", *(f"    {a}  {b}".rstrip() for a, b in zip(shown, helps, strict=True))])


def _print_table(entries: Sequence[Entry], verbose: bool) -> None:
    """In colours and folded to the width of a terminal; plain and one line a line where it goes to a pipe or a file."""
    header = ("kind", "name", "status", "distribution", "devices", "")
    rows = [_row(entry, verbose) for entry in entries]
    if not sys.stdout.isatty():
        widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header) - 1)]
        for *cells, text in [header, *rows]:
            line = "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
            print(f"{line}  {text}".rstrip().replace("\n", "\n" + " " * (len(line) + 2)))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*header, box=None, pad_edge=False)
    for entry, row in zip(entries, rows, strict=True):
        # Text, not markup: what plugins say may hold brackets.
        styles = {2: _STYLES.get(entry.status, "yellow")}
        table.add_row(*(Text(cell, styles.get(column, "")) for column, cell in enumerate(row)))
    Console().print(table)


def _row(entry: Entry, verbose: bool) -> tuple[str, ...]:
    manifest = entry.manifest
    text = [entry.reason or (manifest.summary if manifest else "")]
    text += [f"mend: {entry.mend}"] if entry.mend else []
    text += _details(entry) if verbose else []
    distribution = f"{entry.distribution} {entry.version}".rstrip()
    devices = ", ".join(sorted(manifest.devices)) if manifest else ""
    return entry.kind or "?", entry.name, str(entry.status), distribution, devices, "\n".join(filter(None, text))


def _details(entry: Entry) -> list[str]:
    manifest = entry.manifest
    if manifest is None:
        trace = traceback.format_exception(entry.error) if entry.error else []
        return [f"module: {entry.module}", *"".join(trace).splitlines()]
    requires = ", ".join(" or ".join(group) for group in manifest.requires)
    return [
        f"capabilities: {', '.join(sorted(manifest.capabilities)) or 'none'}",
        f"model types: {', '.join(sorted(manifest.model_types))}",
        f"requires: {requires or 'nothing'}",
        f"factory: {manifest.factory}",
        f"config: {manifest.config}",
        f"planner: {manifest.planner or 'none'}",
    ]


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
