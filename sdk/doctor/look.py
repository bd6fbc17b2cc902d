"""Reading the machine, and running all checks on what was read."""

from __future__ import annotations

import contextlib
import glob
import importlib.metadata
import os
import platform
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from core.config import left_to_device
from core.errors import ManymeshError
from core.hookspecs import PROJECT
from core.registry import Backend, EngineRegistry, Entry, Status, hidden_packages
from sdk.doctor import checks
from sdk.doctor.checks import Finding, Torch

SHARED_MEMORY = "/dev/shm"


def look(names: Sequence[str] = ()) -> Iterator[Finding]:
    """Everything that was found, in the order of the checks. A check that fails itself is a finding.

    Args:
        names: the plugins that will be used: names of backends (also "distribution:name") or distributions; all that
            are installed when empty.

    Raises:
        RegistryError: one that was asked for is not installed.
    """
    entries = entries_of(EngineRegistry.default(), names)
    every: list[tuple[str, Callable[[], list[Finding]]]] = [
        ("python", lambda: checks.python_versions(platform.python_version(), required_pythons(entries))),
        ("packages", _packages),
        ("plugins", lambda: checks.plugins(entries, names)),
        ("pins", lambda: checks.agreement(entries, installed())),
        ("torch", lambda: checks.torch_and_devices(see_torch(), len(glob.glob("/dev/nvidia[0-9]*")))),
        ("dtype", lambda: _settled(entries)),
        ("visible devices", lambda: checks.visible_devices(see_torch(), os.environ)),
        ("ray", _ray),
        ("shared memory", _shared_memory),
        ("disk", _disk),
        ("open files", _open_files),
        ("host name", _host_name),
    ]
    for name, check in every:
        try:
            yield from check()
        except Exception as error:
            detail = f"could not be looked at: {type(error).__name__}: {error}"
            yield Finding(name, "problem", detail, "look at it by hand")


def entries_of(registry: EngineRegistry, names: Sequence[str]) -> list[Entry]:
    """What the names mean, each entry once; all without names. Raises RegistryError for a name that nothing has."""
    if not names:
        return list(registry.entries)
    return list(dict.fromkeys(entry for name in names for entry in registry.named(name)))


def installed() -> dict[str, str]:
    """Versions of all distributions, by normalised name."""
    versions: dict[str, str] = {}
    for each in importlib.metadata.distributions():
        if name := each.metadata["Name"]:
            versions.setdefault(canonicalize_name(name), each.version)
    return versions


def required_pythons(entries: Sequence[Entry]) -> dict[str, str]:
    """Requires-Python of ours and of the plugins' distributions."""
    names = {PROJECT, *(entry.distribution for entry in entries if entry.version)}
    pythons = {}
    for name in sorted(names):
        try:
            metadata = importlib.metadata.metadata(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        pythons[name] = str(metadata.json.get("requires_python") or "")
    return pythons


def see_torch() -> Torch:
    """Import torch and touch each device that it sees."""
    try:
        import torch
        import torch.distributed as dist

        devices = []
        for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
            torch.ones(2, device=f"cuda:{index}").sum().item()
            devices.append((torch.cuda.get_device_name(index), *torch.cuda.mem_get_info(index)))
        hip = getattr(torch.version, "hip", None)
        build = getattr(torch.version, "cuda", None) or hip
        nccl = dist.is_available() and dist.is_nccl_available()
        return Torch(torch.__version__, build, tuple(devices), nccl, "amd" if hip else "nvidia")
    except Exception as error:
        return Torch("", None, error=f"{type(error).__name__}: {error}")


def device_here() -> tuple[str, int | None]:
    """The type of device that ranks on this machine get, and the memory of the smallest one, bytes; None on CPU."""
    devices = see_torch().devices
    return ("cuda", min(total for _, _, total in devices)) if devices else ("cpu", None)


def _settled(entries: Sequence[Entry]) -> list[Finding]:
    import torch

    device, options = device_here()[0], {}
    for entry in entries:
        if isinstance(entry, Backend) and entry.status is Status.OK and entry.kind in ("engine", "rollout"):
            with contextlib.suppress(ManymeshError):  # options that nobody can know
                options[f"{entry.kind} {entry.name}"] = left_to_device(entry.config({"model": "model"}), device)
    return checks.settled(options, device, torch.get_float32_matmul_precision())


def _packages() -> list[Finding]:
    return checks.packages_are_ours({name: (e.message, e.mend) for name, e in hidden_packages().items()})


def _ray() -> list[Finding]:
    from manymesh.recipes.grpo.launch import need_cluster

    needs = (Requirement(text) for text in importlib.metadata.requires(PROJECT) or ())
    requirement = next(str(need.specifier) for need in needs if need.name == "ray")
    cluster, refusal = os.environ.get("RAY_ADDRESS"), ""
    try:
        need_cluster(cluster or "")
    except ManymeshError as error:
        refusal = error.message
    return checks.ray(installed().get("ray"), requirement, cluster, refusal)


def memory() -> int:
    """Bytes of the machine, or of the container where that has less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(file) as limit:
                total = min(total, int(limit.read()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return total


def _shared_memory() -> list[Finding]:
    if not os.path.isdir(SHARED_MEMORY):
        return checks.shared_memory(None, None, memory())
    usage = shutil.disk_usage(SHARED_MEMORY)
    return checks.shared_memory(usage.total, usage.free, memory())


def _disk() -> list[Finding]:
    path = os.environ.get("RAY_TMPDIR") or os.environ.get("RAY_TMP_DIR") or tempfile.gettempdir()
    usage = shutil.disk_usage(path)
    return checks.disk(path, usage.total, usage.free)


def _open_files() -> list[Finding]:
    import resource

    return checks.open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1])


def _host_name() -> list[Finding]:
    name = socket.gethostname()
    try:
        return checks.host_name(name, socket.gethostbyname(name))
    except OSError:
        return checks.host_name(name, None)
