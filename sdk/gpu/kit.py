"""The conformance kit's suites as a step: on this device, in this process's world of one."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sdk.gpu.step import Absent, StepRun
from sdk.gpu.tools import lone_world, need_backend

SUITE = """
{imports}

class TestSuite({bases}):
    kind = {kind!r}
    backend = {backend!r}
    worlds = (1,)
    device = {device!r}
    config = {config!r}
"""


def run_kit(
    run: StepRun,
    kind: str,
    backend: str,
    suites: Mapping[str, str],
    config: Mapping[str, Any] | None = None,
    *,
    title: str = "",
    without: Sequence[str] = (),
    **attributes: Any,
) -> None:
    """A check for each test that fails, and one that counts those that passed.

    Args:
        suites: modules of sdk.conformance.suites by the class that they have.
        config: of the backend.
        without: words in the names of tests that are left out.
        attributes: of the suite, e.g. dtype.

    Raises:
        Absent: the backend cannot be used, or pytest is not installed.
    """
    need_backend(backend, kind)
    if importlib.util.find_spec("pytest") is None:
        raise Absent("the conformance kit runs on pytest, which is not installed")
    from sdk.conformance.base import Session
    from sdk.conformance.in_process import run_suite
    from sdk.testing import Worlds

    lone_world()
    source = SUITE.format(
        imports="\n".join(
            f"from sdk.conformance.suites.{module} import {name} as S{number}"
            for number, (name, module) in enumerate(suites.items())
        ),
        bases=", ".join(f"S{number}" for number in range(len(suites))),
        kind=kind,
        backend=backend,
        device=run.device,
        config=dict(config or {}),
    )
    source += "".join(f"    {name} = {value!r}\n" for name, value in attributes.items())
    session = Session(Worlds(alone_here=True), lambda name: Path(tempfile.mkdtemp(prefix=name, dir=run.folder)))
    selected = ["-k", " and ".join(f"not {word}" for word in without)] if without else []
    tests = run_suite(source, session, selected)
    for test in tests:
        if not test.passed:
            run.check(test.name, False, test.detail)
    num_passed = sum(test.passed for test in tests)
    run.check(f"{title or f'the kit on {backend}'}: {num_passed} of {len(tests)} tests", num_passed == len(tests))
