"""Plugins that pin one distribution in ways that cannot agree are found before anything is launched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from core.errors import RegistryError
from core.registry import EngineRegistry, Entry
from manymesh.pins import can_agree, check_together, conflicts, pins, unmet
from tests.fake_distributions import forget, install, manifest, plugin


@pytest.mark.parametrize(
    ("one", "other", "agree"),
    [
        ("==2.4", ">=2.6", False),
        ("==2.6", ">=2.6", True),
        ("<2.6", ">=2.6", False),
        ("<=2.6", ">=2.6", True),
        (">2.4", "<2.5", True),
        ("==2.4.*", ">=2.4.3", True),
        ("==2.4.*", ">=2.5", False),
        ("~=2.4.1", ">=2.5", False),
        ("~=2.4", ">=2.5", True),
        (">=2.4,!=2.4", "<2.5", True),
        ("==2.4", "!=2.4", False),
        ("<2.4", "<1.0", True),
        (">=2", ">=3", True),
        ("==2.4", "==2.4.0", True),
        ("==2.4+cpu", ">=2.6", False),
        (">1.9.1", "<1.9.2", True),
        (">=1!1.0", "<2.0", False),
    ],
)
def test_two_requirements_agree_where_some_version_satisfies_both(one: str, other: str, agree: bool) -> None:
    assert can_agree(Requirement(f"torch{one}"), Requirement(f"torch{other}")) is agree
    assert can_agree(Requirement(f"torch{other}"), Requirement(f"torch{one}")) is agree


versions = st.tuples(st.integers(0, 3), st.integers(0, 3)).map(lambda pair: f"{pair[0]}.{pair[1]}")
clauses = st.tuples(st.sampled_from(["==", "!=", "<", "<=", ">", ">=", "~="]), versions).map("".join)


@given(st.lists(clauses, min_size=1, max_size=3), st.lists(clauses, min_size=1, max_size=3))
def test_what_any_of_many_versions_satisfies_can_agree(one: list[str], other: list[str]) -> None:
    both = SpecifierSet(",".join([*one, *other]))
    some = any(both.contains(f"{a}.{b}{c}") for a in range(5) for b in range(5) for c in ("", ".1", ".5"))
    have = can_agree(Requirement("x" + ",".join(one)), Requirement("x" + ",".join(other)))
    assert have or not some


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    forget(tmp_path)


def install_needing(site: Path, name: str, *needs: str, **manifest_fields: object) -> None:
    module = name.replace("-", "_")
    info = install(site, name, {f"{module}.py": plugin(manifest(name, module, **manifest_fields))})
    with (info / "METADATA").open("a") as file:
        file.writelines(f"Requires-Dist: {need}\n" for need in needs)


def found(*names: str) -> list[Entry]:
    return [entry for entry in EngineRegistry.discover({}).entries if entry.distribution in names]


def test_two_chosen_plugins_that_cannot_share_an_environment_are_named_with_the_ways_out(site: Path) -> None:
    install_needing(site, "dist-a", "torch==2.4", "attrs>=20")
    install_needing(site, "dist-b", "torch (>=2.6)", "nobody-has-this; extra == 'x'")
    with pytest.raises(RegistryError, match="dist-a and dist-b cannot share an environment") as raised:
        check_together(found("dist-a", "dist-b"))
    assert raised.value.have == "dist-a needs torch==2.4; dist-b needs torch>=2.6"
    assert "dist-a and dist-b that agree on torch" in raised.value.mend
    assert "environment of its own" in raised.value.mend


def test_pins_of_a_manifest_count_and_alternatives_do_not(site: Path) -> None:
    install_needing(site, "dist-a", requires=(("torch==2.4",),))
    install_needing(site, "dist-b", requires=(("torch>=2.6",),))
    install_needing(site, "dist-c", requires=(("torch>=2.6", "other"),))
    ((one, other),) = conflicts(found("dist-a", "dist-b"))
    assert {one.owner, other.owner} == {"dist-a", "dist-b"}
    assert conflicts(found("dist-a", "dist-c")) == []


def test_one_plugins_own_pins_and_two_backends_of_one_distribution_are_no_conflict(site: Path) -> None:
    both = [manifest(name, "dist_a", requires=(("torch==2.4",),)) for name in ("x", "y")]
    install(site, "dist-a", {"dist_a.py": plugin(*both)})
    check_together(found("dist-a"))


def test_pins_that_the_installed_version_breaks_are_found_and_what_is_missing_is_not_among_them(site: Path) -> None:
    install_needing(site, "dist-a", "torch==2.4", "attrs>=20", "gone>=1")
    have = [(str(pin), version) for pin, version in unmet(found("dist-a"), {"torch": "2.13.0+cpu", "attrs": "26.1"})]
    assert have == [("dist-a needs torch==2.4", "2.13.0+cpu")]
    assert unmet(found("dist-a"), {"torch": "2.4.0+cpu"}) == []


def test_this_projects_own_plugins_can_share_an_environment() -> None:
    entries = [entry for entry in EngineRegistry.discover({}).entries if entry.distribution.startswith("manymesh")]
    assert len({entry.distribution for entry in entries}) >= 3
    assert all(pins(entry) for entry in entries)
    check_together(entries)
