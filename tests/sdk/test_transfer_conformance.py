"""The transfers of this repository, and the scaffold's, keep the contract of transfers."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import ClassVar

import pytest

from sdk.conformance import TransferConformance
from sdk.conformance.base import Session
from sdk.scaffold.generate import generate
from sdk.scaffold.names import Names
from tests.sdk.kit import mutants


class TestCollective(TransferConformance):
    backend = "collective"


class TestIpc(TransferConformance):
    backend = "ipc"


class TestDisk(TransferConformance):
    backend = "disk"
    config: ClassVar = {"directory": str(Path(tempfile.gettempdir(), "manymesh-conformance"))}


@pytest.mark.ci
@pytest.mark.usefixtures("ray_cluster")
class TestObjectStore(TransferConformance):
    backend = "object_store"
    patience_s = 60.0  # each sender starts an actor


# A few here, which cost seconds; all of them in the slow set.
FEW = (
    "gives a bucket's pieces in another order",
    "receives every bucket into one buffer",
    "keeps one bucket, and writes the next over it before it was freed",
    "gives zeros to all receivers but the first",
    "gives up on a bucket that is not there yet",
    "cannot be closed twice",
)


def test_the_suite_finds_some_faults(conformance_session: Session) -> None:
    assert mutants.find_misses("transfer", conformance_session, only=FEW) == {}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_suite_finds_every_fault(conformance_session: Session) -> None:
    assert mutants.find_misses("transfer", conformance_session) == {}


@pytest.mark.ci  # tests/test_docs.py makes an engine and a rollout
def test_a_new_transfer_keeps_the_contract_from_the_start(tmp_path: Path) -> None:
    """As an editable install: metadata that points at the sources."""
    project = tmp_path / "acme"
    generate(Names.of("acme-transfer", "transfer"), project)
    info = project / "acme_transfer-0.1.0.dist-info"
    info.mkdir()
    needs = "Requires-Dist: attrs\nRequires-Dist: torch\n"
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: acme-transfer\nVersion: 0.1.0\n{needs}")
    (info / "entry_points.txt").write_text("[manymesh.v1]\nacme-transfer = acme_transfer.manifest\n")
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=project,
        env=os.environ | {"PYTHONPATH": str(project), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert "conformance acme-transfer 0.1.0: 28 passed, 1 closed by capabilities; score 28/28" in process.stdout
