"""A run's config on this machine: what its parts leave to the device, and what each of its ranks would hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from core.config import left_to_device
from core.errors import ManymeshError
from core.manifest import Kind
from core.registry import Backend, EngineRegistry
from sdk.doctor import checks
from sdk.doctor.checks import Finding

MEND = "see what the config says there"


def look_at_run(file: str, overrides: Sequence[str], device: str, device_bytes: int | None) -> Iterator[Finding]:
    """What a GRPO config comes to, before any process is started.

    Args:
        overrides: `path.to.key=value`, as the recipe takes them.
        device: torch device type that the ranks will have.
        device_bytes: memory of one; None: not known, and nothing is compared with it.
    """
    from manymesh.recipes.grpo.config import GrpoConfig
    from manymesh.recipes.grpo.memory import RESERVE, unknown_parts, worst_moments
    from manymesh.recipes.grpo.placement import Placement
    from manymesh.recipes.yaml_config import load_yaml, override

    try:
        placement = Placement(GrpoConfig.of(override(load_yaml(file), overrides)), elsewhere=True)
        placement.check()
        worker = placement.worker()
        options = {
            "actor": _settled("engine", worker.actor, device),
            "rollout": _settled("rollout", placement.rollout_worker(), device),
        }
        for backend in (_backend("engine", worker.actor), _backend("rollout", placement.rollout_worker())):
            yield from checks.plugins([backend])[:1]
        yield from checks.settled(options, device)
        for part in unknown_parts(placement):
            yield Finding(f"memory: {part}", "ok", "its backend gives no estimate; it counts nothing below")
        for pool, moments in worst_moments(placement, device, device_bytes).items():
            for moment in moments:
                name = moment.name if pool == "pool" else f"{moment.name} ({pool})"
                kind = moment.largest[1]
                yield checks.device_memory(name, str(moment), moment.total, kind, device_bytes, RESERVE)
    except ManymeshError as error:
        have = f"; have: {error.have}" if error.have is not None else ""
        want = f"; want: {error.want}" if error.want is not None else ""
        yield Finding("run", "problem", f"{error.message}{have}{want}", error.mend or MEND)


def _settled(kind: Kind, part: Any, device: str) -> dict[str, Any]:
    return left_to_device(_backend(kind, part).config(part.engine), device)


def _backend(kind: Kind, part: Any) -> Backend:
    return EngineRegistry.default().find(part.backend, kind, elsewhere=True)
