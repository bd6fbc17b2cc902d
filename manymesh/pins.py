"""Whether what plugins require of other distributions can all be true in one environment. Imports nothing heavy."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations

import attrs
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from core.errors import RegistryError
from core.registry import Backend, Entry


@attrs.frozen
class Pin:
    """One distribution requires another in certain versions: by its metadata, or a manifest of its."""

    owner: str
    requirement: Requirement

    @property
    def on(self) -> str:
        """The distribution that is required, normalised."""
        return canonicalize_name(self.requirement.name)

    def __str__(self) -> str:
        return f"{self.owner} needs {self.requirement.name}{self.requirement.specifier}"


def pins(entry: Entry) -> list[Pin]:
    """What a plugin requires that a version can break. A manifest's alternatives are no pins: one may do where the
    other does not."""
    try:
        texts = importlib.metadata.requires(entry.distribution) or []
    except importlib.metadata.PackageNotFoundError:
        texts = []
    if isinstance(entry, Backend):
        texts += [group[0] for group in entry.manifest.requires if len(group) == 1]
    result = []
    for text in texts:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if requirement.specifier and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            result.append(Pin(entry.distribution, requirement))
    return result


def conflicts(entries: Iterable[Entry]) -> list[tuple[Pin, Pin]]:
    """Pairs of pins of different plugins on one distribution, of which no version satisfies both."""
    by_target: dict[str, dict[str, Pin]] = {}
    for pin in {str(pin): pin for entry in entries for pin in pins(entry)}.values():
        by_target.setdefault(pin.on, {})[str(pin)] = pin
    return [
        (one, other)
        for of_one in by_target.values()
        for one, other in combinations(of_one.values(), 2)
        if one.owner != other.owner and not can_agree(one.requirement, other.requirement)
    ]


def unmet(entries: Iterable[Entry], versions: Mapping[str, str]) -> list[tuple[Pin, str]]:
    """Pins that the installed version of a distribution breaks, with that version. What isn't installed at all is not
    among them: the listing has it.

    Args:
        versions: of what is installed, by normalised name.
    """
    return [
        (pin, versions[pin.on])
        for entry in entries
        for pin in pins(entry)
        if pin.on in versions and not pin.requirement.specifier.contains(versions[pin.on], prereleases=True)
    ]


def check_together(entries: Iterable[Entry]) -> None:
    """See that chosen plugins can share an environment.

    Raises:
        RegistryError: naming those that cannot, and the ways out.
    """
    for one, other in conflicts(entries):
        raise RegistryError(
            f"{one.owner} and {other.owner} cannot share an environment: no version of {one.on} suits both",
            have=f"{one}; {other}",
            mend=ways_out(one, other),
        )


def ways_out(one: Pin, other: Pin) -> str:
    return (
        f"install versions of {one.owner} and {other.owner} that agree on {one.on}; or give one of them a pool with an"
        " environment of its own (pool.python, rollout_pool.python)"
    )


def can_agree(one: Requirement, other: Requirement) -> bool:
    """Whether some version satisfies both. Exact, but for arbitrary equality (`===`) of what is no version.

    What satisfies a set of bounds satisfies it at one of them, or right behind one.
    """
    both = one.specifier & other.specifier
    return any(both.contains(version, prereleases=True) for version in _around(one, other))


def _around(*requirements: Requirement) -> Iterator[Version]:
    yield Version("0")
    for requirement in requirements:
        for each in requirement.specifier:
            try:
                version = Version(each.version.removesuffix(".*"))
            except InvalidVersion:
                continue
            yield version
            release = ".".join(map(str, version.release))
            epoch = f"{version.epoch}!" if version.epoch else ""
            yield Version(f"{epoch}{release}.0.0.1")
            yield Version(f"{epoch}{release}.post1")
            *head, last = version.release
            yield Version(f"{epoch}{'.'.join(map(str, [*head, last + 1]))}")
            # Right below a bound: a release that is smaller by any amount.
            if last:
                yield Version(f"{epoch}{'.'.join(map(str, [*head, last - 1, 999999]))}")
            elif head and any(head):
                yield Version(f"{epoch}{'.'.join(map(str, [*head[:-1], max(head[-1] - 1, 0), 999999]))}")
