"""Backends that were registered at run time, on their way from the driver to the workers of a group.

A backend that cannot be sent does not fail the group: workers list it as broken, with the reason, and refuse it.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs
from ray import cloudpickle

from core.manifest import Kind, Manifest
from core.registry import RUN_TIME, EngineRegistry, Entry, Status


@attrs.frozen
class Parcel:
    """A manifest as Ray's pickle, or the reason why there is none."""

    kind: Kind
    name: str
    pickle: bytes | None
    reason: str = ""


def packed() -> tuple[Parcel, ...]:
    """All that this process has registered. What stands in a module travels as its name, what stands in a notebook or
    script as it is."""
    return tuple(_packed(backend.manifest) for backend in EngineRegistry.default().registered)


def _packed(manifest: Manifest) -> Parcel:
    try:
        return Parcel(manifest.kind, manifest.name, cloudpickle.dumps(manifest))
    except Exception as error:
        return Parcel(manifest.kind, manifest.name, None, f"{type(error).__name__}: {error}")


def unpack(parcels: Iterable[Parcel]) -> None:
    """Register them in this process."""
    for parcel in parcels:
        reason = parcel.reason
        if parcel.pickle is not None:
            try:
                EngineRegistry.default().register(cloudpickle.loads(parcel.pickle))
                continue
            except Exception as error:  # for example a module that is not there
                reason = f"{type(error).__name__}: {error}"
        EngineRegistry.default().add(
            Entry(
                parcel.name,
                parcel.kind,
                Status.BROKEN,
                RUN_TIME,
                "",
                "",
                f"it was registered in the driver and cannot be had here: {reason}",
                "move it to a module that workers can import, or to the driver's own script or notebook, and keep what"
                " cannot be pickled out of its globals",
            )
        )
