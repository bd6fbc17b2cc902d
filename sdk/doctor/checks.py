"""The checks. Each looks at values that are handed to it and gives what it found; sdk/doctor/look.py reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import attrs
from packaging.specifiers import SpecifierSet

from core.device import SHOWN_BY, Vendor, visible
from core.registry import Entry, Status
from manymesh import pins

Level = Literal["ok", "warning", "problem"]
LEVELS: tuple[Level, ...] = ("ok", "warning", "problem")
MIB, GIB = 2**20, 2**30
# Docker gives 64 MiB unless told otherwise: NCCL's and gloo's buffers of a few ranks are more.
LEAST_SHARED = 256 * MIB
# Ray stops making objects at this share of a disk; see `local_fs_capacity_threshold`.
FULL_DISK = 0.95
LEAST_OPEN_FILES = 4096  # hard limit: Ray raises the soft one by itself


@attrs.frozen
class Finding:
    """What one check found.

    Attributes:
        check: what was looked at, e.g. "shared memory".
        level: "warning": some things don't work, or slowly. "problem": runs fail.
        detail: what was found.
        mend: what to do; "" when ok.
    """

    check: str
    level: Level
    detail: str
    mend: str = ""


def python_versions(have: str, requirements: Mapping[str, str]) -> list[Finding]:
    """Python's version against what distributions require of it.

    Args:
        requirements: specifiers (Requires-Python) by distribution.
    """
    wrong = {name: each for name, each in requirements.items() if each and not SpecifierSet(each).contains(have)}
    if not wrong:
        return [Finding("python", "ok", have)]
    mend = "make an environment with a Python that all accept"
    return [Finding("python", "problem", f"{have}, but {name} wants {each}", mend) for name, each in wrong.items()]


def plugins(entries: Sequence[Entry], names: Sequence[str] = ()) -> list[Finding]:
    """What became of each plugin.

    Args:
        names: of those that will be used: with them anything but ok is a problem.
    """
    findings = []
    for entry in entries:
        of = f"{entry.distribution} {entry.version}".rstrip()
        detail = of if entry.status is Status.OK else f"{of} is {entry.status}: {entry.reason}"
        level: Level = "problem"
        if entry.status is Status.OK or (entry.status is Status.DISABLED and not names):
            level = "ok"
        elif entry.status is Status.MISSING_DEPENDENCY and not names:
            level = "warning"
        mend = "" if level == "ok" else entry.mend
        findings.append(Finding(f"{entry.kind or 'plugin'} {entry.name}", level, detail, mend))
    kinds = {entry.kind for entry in entries if entry.status is Status.OK}
    for kind in ("engine", "rollout"):
        if not names and kind not in kinds:
            mend = "`python -m core.list_engines` says how to install one"
            findings.append(Finding(kind, "warning", f"no {kind} can be used", mend))
    return findings


def agreement(entries: Sequence[Entry], versions: Mapping[str, str]) -> list[Finding]:
    """Whether what plugins require of other distributions can be true together, and is.

    Args:
        versions: of what is installed, by normalised name.
    """
    findings = []
    for one, other in pins.conflicts(entries):
        detail = f"{one.owner} and {other.owner} cannot share an environment: {one}, {other}"
        findings.append(Finding("pins", "problem", detail, pins.ways_out(one, other)))
    reported = {(pin.owner, pin.on) for pair in pins.conflicts(entries) for pin in pair}
    for pin, have in dict.fromkeys(pins.unmet(entries, versions)):
        if (pin.owner, pin.on) not in reported:
            mend = f"pip install '{pin.requirement.name}{pin.requirement.specifier}', or another {pin.owner}"
            findings.append(Finding("pins", "problem", f"{pin}, installed is {have}", mend))
    return findings or [Finding("pins", "ok", "the plugins' requirements agree")]


@attrs.frozen
class Torch:
    """What torch says of itself and of its devices."""

    version: str
    cuda_build: str | None  # the CUDA that it was built for
    devices: tuple[tuple[str, int, int], ...] = ()  # name, bytes free, bytes in all
    nccl: bool = False
    vendor: Vendor = "nvidia"  # of what it calls CUDA
    error: str = ""  # why it cannot be imported, or a device not be used


def torch_and_devices(torch: Torch, gpus_on_machine: int) -> list[Finding]:
    """Whether torch can be imported, and uses the GPUs that the machine has.

    Args:
        gpus_on_machine: NVIDIA devices that the system shows (/dev/nvidia0, ...).
    """
    if torch.error:
        mend = "reinstall torch for this machine; see https://pytorch.org/get-started/locally"
        return [Finding("torch", "problem", torch.error, mend)]
    findings = [
        Finding("torch", "ok", f"{torch.version}, {'CUDA ' + torch.cuda_build if torch.cuda_build else 'for CPU'}")
    ]
    if gpus_on_machine and not torch.cuda_build:
        detail = f"the machine has {gpus_on_machine} NVIDIA GPUs, and torch {torch.version} is a build for CPU"
        findings.append(Finding("GPUs", "problem", detail, "install torch's CUDA build"))
    elif torch.cuda_build and not torch.devices:
        mend = "look at `nvidia-smi` and CUDA_VISIBLE_DEVICES; in a container start it with --gpus all"
        level: Level = "problem" if gpus_on_machine else "warning"
        findings.append(Finding("GPUs", level, "torch is built for CUDA and sees no device: it will run on CPU", mend))
    elif torch.devices and not torch.nccl:
        mend = "install torch's build for Linux and CUDA"
        findings.append(Finding("GPUs", "problem", "torch has no NCCL: ranks cannot share gradients on GPUs", mend))
    for number, (name, free, total) in enumerate(torch.devices):
        detail = f"{name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free"
        busy = free < total / 2
        mend = "see with `nvidia-smi` who holds the memory" if busy else ""
        findings.append(Finding(f"GPU {number}", "warning" if busy else "ok", detail, mend))
    if len(findings) == 1:
        findings.append(Finding("GPUs", "ok", "none"))
    return findings


def settled(options: Mapping[str, Mapping[str, object]], device: str, matmul: str = "highest") -> list[Finding]:
    """What options that are left to the device are on this machine's.

    Args:
        options: by part or backend, those that are left to it.
        device: torch device type.
        matmul: torch.get_float32_matmul_precision().
    """
    words = [
        f"{name} {' '.join(f'{key}={value}' for key, value in each.items())}" for name, each in options.items() if each
    ]
    float32 = "" if device == "cpu" else f"; float32 products {'without' if matmul == 'highest' else 'with'} TF32"
    return [Finding("dtype", "ok", f"auto on {device}: {', '.join(words)}{float32}")] if words else []


# What to do where most of a device's memory is this.
LESS: Mapping[str, str] = {
    "activations": "lower actor.micro_batch.max_tokens, or recompute (gradient_checkpointing, recompute)",
    "kv_cache": "lower rollout.engine.gpu_memory_utilization, or set rollout.release_after_generate",
    "gradients": "more ranks or another engine; FSDP holds unsharded gradients with several micro-batches a step",
    "optimizer": "more ranks, or set offload_optimizer",
    "parameters": "more ranks, or set offload_parameters",
}


def device_memory(name: str, detail: str, total: int, largest: str, device_bytes: int | None, reserve: int) -> Finding:
    """Whether what a run's rank would hold fits its device.

    Args:
        detail: who holds what, in words.
        total: bytes, by the estimate.
        largest: a key of LESS: most of it.
        device_bytes: of the device; None: not known.
        reserve: bytes of it that nobody has.
    """
    if device_bytes is None:
        return Finding(f"memory: {name}", "ok", detail)
    fits = total + reserve <= device_bytes
    detail += f"; a device has {device_bytes / GIB:.1f} GiB, of which {reserve / GIB:.0f} are left free"
    return Finding(f"memory: {name}", "ok" if fits else "problem", detail, "" if fits else LESS[largest])


def visible_devices(torch: Torch, environment: Mapping[str, str]) -> list[Finding]:
    """What variables show of the machine's accelerators, and how many of them a process can have."""
    names = [name for name in SHOWN_BY[torch.vendor] if environment.get(name)]
    shown, seen = visible(torch.vendor, environment), len(torch.devices)
    told = ", ".join(f"{name}={environment[name]}" for name in names)
    if len({environment[name] for name in names}) > 1:
        mend = f"unset {', '.join(names[1:])}: {names[0]} counts, and libraries that read another count otherwise"
        return [Finding("visible devices", "warning", told, mend)]
    if shown is not None and len(shown) > seen and torch.cuda_build:
        said = f"{told} names {len(shown)} devices, and torch sees {seen}"
        return [Finding("visible devices", "problem", said, f"name devices that there are in {names[0]}, each once")]
    if not seen:
        return []
    said = f"{told or 'all'}: a process can have {seen} (gpus_per_process of its pool)"
    return [Finding("visible devices", "ok", said)]


def shared_memory(total: int | None, free: int | None, memory: int) -> list[Finding]:
    """/dev/shm, where Ray's objects and the buffers of NCCL and gloo lie.

    Args:
        total, free: bytes; None where there is no such place.
        memory: bytes of the machine, or of the container.
    """
    if total is None or free is None:
        return [Finding("shared memory", "ok", "no /dev/shm: Ray uses its temporary directory")]
    detail = (
        f"/dev/shm has {free / GIB:.1f} of {total / GIB:.1f} GiB free, the machine {memory / GIB:.0f} GiB of memory"
    )
    if free < LEAST_SHARED:
        mend = "in a container: --shm-size=8g or --ipc=host; else delete what killed processes left in /dev/shm"
        return [Finding("shared memory", "problem", detail, mend)]
    if free < 0.3 * memory:  # Ray's object store by default
        mend = "a larger one (--shm-size in a container), or fewer bytes for Ray: object_store_memory"
        return [Finding("shared memory", "warning", f"{detail}: Ray's objects go to disk, which is slow", mend)]
    return [Finding("shared memory", "ok", detail)]


def disk(path: str, total: int, free: int) -> list[Finding]:
    """The disk of Ray's temporary directory."""
    detail = f"{path}: {free / GIB:.1f} of {total / GIB:.1f} GiB free"
    if total and free < (1 - FULL_DISK) * total:
        return [Finding("disk", "problem", f"{detail}: Ray refuses objects there", "free space, or set RAY_TMPDIR")]
    return [Finding("disk", "ok", detail)]


def open_files(hard_limit: int) -> list[Finding]:
    """How many files (and connections) a process may have open."""
    if 0 <= hard_limit < LEAST_OPEN_FILES:
        mend = f"ulimit -Hn {LEAST_OPEN_FILES} or more (in a container: --ulimit nofile=65536)"
        return [Finding("open files", "warning", f"at most {hard_limit} a process", mend)]
    return [Finding("open files", "ok", "no limit" if hard_limit < 0 else f"at most {hard_limit} a process")]


def host_name(name: str, address: str | None) -> list[Finding]:
    """Whether the machine's own name leads somewhere: gloo asks for it."""
    if address is None:
        mend = f"add a line '127.0.0.1 {name}' to /etc/hosts, or set GLOO_SOCKET_IFNAME to a network interface"
        return [Finding("host name", "problem", f"{name!r} has no address, so gloo cannot open a world", mend)]
    return [Finding("host name", "ok", f"{name} is {address}")]


def ray(version: str | None, requirement: str, cluster: str | None, refusal: str = "") -> list[Finding]:
    """Ray, and the cluster that RAY_ADDRESS names.

    Args:
        version: None where it is not installed.
        requirement: what manymesh requires of it.
        cluster: RAY_ADDRESS, if set.
        refusal: why nobody answers there.
    """
    if version is None or not SpecifierSet(requirement).contains(version, prereleases=True):
        detail = f"{version or 'not installed'}, manymesh wants {requirement}"
        return [Finding("ray", "problem", detail, f"pip install 'ray{requirement}'")]
    if refusal:
        mend = "start it (ray start --head), or unset RAY_ADDRESS to use this machine alone"
        return [Finding("ray", "problem", refusal, mend)]
    return [Finding("ray", "ok", f"{version}, {f'cluster at {cluster}' if cluster else 'this machine alone'}")]


def packages_are_ours(hidden: Mapping[str, tuple[str, str]]) -> list[Finding]:
    """Whether `core`, `manymesh` and `sdk` are the installed ones.

    Args:
        hidden: what hides one of them, in a sentence, and the mend, by package.
    """
    problems = [Finding(package, "problem", sentence, mend) for package, (sentence, mend) in hidden.items()]
    return problems or [Finding("packages", "ok", "core, manymesh and sdk are the installed ones")]
