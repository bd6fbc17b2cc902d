"""Workers in an environment of their own: which interpreters are refused before Ray is asked, and that others work."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from core import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from core.errors import Refused
from core.transport.ray.environment import checked_python
from tests.support.workers import Echo

OURS = {
    "python": ".".join(map(str, sys.version_info[:3])),
    **{name: version(name) for name in ("ray", "manymesh", "numpy")},
}


def interpreter(directory: Path, script: str) -> str:
    """A program that takes a Python's place."""
    directory.mkdir(exist_ok=True)
    file = directory / "python"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return str(file)


def telling(directory: Path, **changes: str | None) -> str:
    return interpreter(directory, f"echo '{json.dumps(OURS | changes)}'")


def test_an_environment_may_differ_in_what_does_not_cross(tmp_path: Path) -> None:
    minor = ".".join(OURS["python"].split(".")[:2])
    path = telling(tmp_path, python=f"{minor}.99", numpy=OURS["numpy"].split(".")[0] + ".0.1")
    assert checked_python(path) == path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ray": None}, rf"have: ray not installed\s+want: ray {OURS['ray']}, as.*\s+mend: .* pip install ray=="),
        ({"ray": "2.1.0"}, rf"have: ray 2\.1\.0\s+want: ray {OURS['ray']}"),
        ({"python": "3.8.1"}, r"have: python 3\.8\.1\s+want: python 3\.\d+, as.*\s+mend: make the environment with Py"),
        ({"manymesh": "9.9", "numpy": "1.26.4"}, r"manymesh 9\.9, numpy 1\.26\.4\s+want: manymesh .*, numpy \d, as"),
    ],
)
def test_what_must_match_is_refused_with_both_versions_and_the_mend(
    tmp_path: Path, changes: dict[str, str | None], message: str
) -> None:
    with pytest.raises(Refused, match=message):
        checked_python(telling(tmp_path, **changes))


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("sleep 60", "timed out"),
        ("echo no module named json >&2; exit 1", "no module named json"),
        ("echo nonsense", "Expecting value"),
        ("true", "no Python"),
    ],
)
def test_what_is_no_python_or_never_answers_is_refused(tmp_path: Path, script: str, message: str) -> None:
    with pytest.raises(Refused, match=rf"is no Python[\s\S]*{message}|is {message}"):
        checked_python(interpreter(tmp_path, script), timeout_s=0.5)
    with pytest.raises(Refused, match=r"No such file[\s\S]*every node has"):
        checked_python(str(tmp_path / "nowhere"))


def test_an_environment_is_looked_at_again_only_when_it_was_refused(tmp_path: Path) -> None:
    path = telling(tmp_path, ray=None)
    with pytest.raises(Refused, match="ray not installed"):
        checked_python(path)
    assert checked_python(telling(tmp_path)) == path  # mended
    assert checked_python(telling(tmp_path, ray=None)) == path


def test_workers_run_in_the_environment_and_a_group_of_an_unfit_one_is_refused(
    ray_cluster: None, tmp_path: Path
) -> None:
    with RayResourcePool([1]) as pool:
        with pytest.raises(Refused, match="ray not installed"):
            RayWorkerGroup(pool, RayClassWithInitArgs(Echo, [0], [0]), python=telling(tmp_path / "bad", ray=None))
        record = tmp_path / "seen"
        path = interpreter(tmp_path / "with space", f'echo "$@" >> {record}\nexec {sys.executable} "$@"')
        with RayWorkerGroup(pool, RayClassWithInitArgs(Echo, [0], [0]), python=path) as group:
            assert group.world_size == 1
        assert "default_worker" in record.read_text()
