"""The dispatch modes' suite on the scaffold's mode and on core's own; and it bites."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sdk.scaffold.generate import generate
from sdk.scaffold.names import Names
from tests.sdk.kit import dispatch_mode_faults, dispatch_modes, mutants
from tests.sdk.kit.faults import mutants_in


class TestTemplate(dispatch_modes.Template):
    """The scaffold's mode."""


class TestOnMesh(dispatch_modes.OnMesh):
    """Core's own, with ranks that share rows and of which one answers."""


class TestAllToAll(dispatch_modes.AllToAll):
    """A mode that deals no rows: the tests of rows are closed."""


@pytest.mark.ci  # the suite runs on the template above
def test_a_new_dispatch_mode_is_a_whole_project_that_passes_the_kit(tmp_path: Path) -> None:
    project = tmp_path / "acme"
    files = generate(Names.of("acme-thing", "dispatch_mode"), project)
    inside = {str(file.relative_to(project)) for file in files}
    assert {f"acme_thing/{file}" for file in ("__init__.py", "dispatch_mode.py", "manifest.py", "py.typed")} <= inside
    assert not any("emplate" in text for text in [*inside, *(file.read_text() for file in files)])
    info = project / "acme_thing-0.1.0.dist-info"
    info.mkdir()
    needs = "".join(f"Requires-Dist: {name}\n" for name in ("manymesh", "tensordict", "torch"))
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: acme-thing\nVersion: 0.1.0\n{needs}")
    (info / "entry_points.txt").write_text("[manymesh.v1]\nacme-thing = acme_thing.manifest\n")
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(project), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=project,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout[-3000:]
    assert "conformance acme-thing 0.1.0: 32 passed; score 32/32" in process.stdout
    for command in (["check"], ["format", "--check"]):
        process = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "."], cwd=project, capture_output=True, text=True
        )
        assert process.returncode == 0, process.stdout + process.stderr


def test_the_suite_finds_every_fault_that_is_planted_in_a_mode() -> None:
    planted = mutants_in([dispatch_mode_faults])
    assert len(planted) >= 13
    results = mutants.run("dispatch_mode", dispatch_modes.Template.backend, planted)
    assert [each.mutant.name for each in results if not each.caught] == []
