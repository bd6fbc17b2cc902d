"""Modes that the dispatch modes' suite runs on. They need no distribution: each suite has its entry itself."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

from core.dispatch import Dispatch, on_mesh
from core.manifest import Manifest
from core.registry import RUN_TIME, Backend, Status
from sdk.conformance.suites.dispatch import DispatchSuite
from sdk.scaffold.generate import template


def template_mode() -> Any:
    folder = str(template("dispatch_mode"))
    if folder not in sys.path:
        sys.path.append(folder)
    from manymesh_template_dispatch_mode.dispatch_mode import MODE

    return MODE


class OfObject(DispatchSuite):
    """A suite of a mode that is an object here."""

    of: ClassVar[Any]

    @classmethod
    def entry(cls) -> Backend:
        manifest = Manifest(kind="dispatch_mode", name=cls.backend, factory=cls.of, summary="an object")
        return Backend(cls.backend, "dispatch_mode", Status.OK, RUN_TIME, "", "core", manifest=manifest)


class Template(OfObject):
    backend = "template-dispatch-mode"
    of = template_mode()


class OnMesh(OfObject):
    backend = "on-mesh"
    of = on_mesh("m")


class AllToAll(OfObject):
    backend = "all-to-all"
    of = Dispatch.ALL_TO_ALL
    deals_rows = False
