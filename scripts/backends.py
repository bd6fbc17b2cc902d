"""Write docs/backends.md from the manifests and options of this repository's backends: `python -m scripts.backends`.

A test sees that the page is up to date.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from core.list_engines import Option, options
from core.manifest import Capability
from core.registry import Backend, EngineRegistry

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/backends.md"
INTRO = """\
# Backends compared

What the backends of this repository offer, made from their manifests and options by `make docs`. What one doesn't offer
raises `Refused` when it is asked for. `python -m core.list_engines NAME` shows one in full, also somebody else's.
"""
MEANING = {
    Capability.CHECKPOINT: "saves and loads its training state",
    Capability.RESHARD: "a checkpoint loads at another number of ranks",
    Capability.OFFLOAD: "weights and optimizer move to CPU between phases",
    Capability.ADAPTER: "the adapter alone can be exported, and switched off",
    Capability.PACKED: "a micro-batch costs its tokens, not rows x width",
    Capability.ROW_SEEDS: "a row's draws depend on its seed alone, not on batch or ranks",
    Capability.RELEASE: "frees its memory by tag, and takes it again",
    Capability.SERVER: "streams, aborts, pauses; weights change in the midst of requests",
    Capability.SCORE: "log-probs and most likely tokens of a given text",
    Capability.LOG_PROBS_RAW: "log-probs of the logits",
    Capability.LOG_PROBS_TEMPERATURE: "log-probs of logits / temperature",
    Capability.LOG_PROBS_PROCESSED: "log-probs after penalties and truncation",
}


def main() -> None:
    PAGE.write_text(page())
    print(f"wrote {PAGE.relative_to(ROOT)}")


def page() -> str:
    """The whole page."""
    entries = EngineRegistry.discover().entries
    names = {re.sub(r"_", "-", path.name.removesuffix("_rollout")) for path in (ROOT / "plugins").iterdir()}
    ours = {f"manymesh-{name}" for name in names}
    parts = [INTRO]
    for kind, title in (("rollout", "Rollouts"), ("engine", "Training engines")):
        backends = [entry for entry in entries if isinstance(entry, Backend) and entry.kind == kind]
        parts += [f"## {title}\n", *compared([each for each in backends if each.distribution in ours])]
    return "\n".join(parts).rstrip() + "\n"


def compared(backends: Sequence[Backend]) -> Iterator[str]:
    manifests = {backend.name: backend.manifest for backend in backends}
    for name, manifest in manifests.items():
        yield f"- **{name}**: {manifest.summary}. `{', '.join(map(' or '.join, manifest.requires))}`"
    yield ""
    yield from table(
        ["offers", *manifests],
        [
            [f"{each}: {meaning}", *("yes" if each in manifest.capabilities else "" for manifest in manifests.values())]
            for each, meaning in MEANING.items()
            if any(each in manifest.capabilities for manifest in manifests.values())
        ],
    )
    options_of = {backend.name: {each.name: each for each in options(backend.load("config"))} for backend in backends}
    yield "Options and their defaults; those without one must be given.\n"
    yield from table(["option", *options_of], rows(options_of))


def rows(options_of: Mapping[str, Mapping[str, Option]]) -> Iterator[list[str]]:
    """Those that more have come first."""
    names = dict.fromkeys(name for each in options_of.values() for name in each)
    for name in sorted(names, key=lambda name: -sum(name in each for each in options_of.values())):
        cells = []
        for each in options_of.values():
            option = each.get(name)
            cells.append("" if option is None else "required" if option.default is None else f"`{option.default}`")
        yield [f"`{name}`", *cells]


def table(head: Sequence[str], lines: Iterator[list[str]] | Sequence[list[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    for line in lines:
        yield f"| {' | '.join(each.replace('|', chr(92) + '|') for each in line)} |"
    yield ""


if __name__ == "__main__":
    main()
