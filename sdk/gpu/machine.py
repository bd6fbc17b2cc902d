"""Steps 00 and 01: what is there, and whether ranks find their device and each other."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from core.device import choose_device
from core.errors import Refused
from manymesh.parts.environment import environment_of
from sdk.doctor.look import look
from sdk.gpu.step import StepRun, one_line
from sdk.gpu.tools import GIB, lone_world

LIBRARIES = ("transformers", "ray", "vllm", "sglang", "megatron.core", "transformer_engine", "flash_attn", "triton")
PREFIXES = ("CUDA_", "NVIDIA_", "NCCL_", "HIP_", "RAY_", "PYTORCH_", "TORCH_", "LOCAL_")


def inventory(run: StepRun) -> None:
    """What is there. A problem that the doctor finds in torch or its devices fails; others are told."""
    for finding in look():
        if finding.level == "problem" and finding.check.startswith(("torch", "GPU", "visible devices", "python")):
            run.check(finding.check, False, f"{finding.detail}; {finding.mend}")
        elif finding.level != "ok":
            run.absent(finding.check, f"{finding.level}: {finding.detail}")
    run.check(f"torch {torch.__version__}, CUDA {torch.version.cuda}", True)
    if run.on_cuda:
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "none"
        run.check(f"{torch.cuda.device_count()} of {torch.cuda.get_device_name()}, NCCL {nccl}", True)
        free, total = torch.cuda.mem_get_info()
        run.figure("free memory", free / GIB, "GiB", f"of {total / GIB:.1f}")
    for name in LIBRARIES:
        try:
            module = importlib.import_module(name)
        except Exception as error:
            run.absent(name, one_line(error))
        else:
            run.check(f"{name} {getattr(module, '__version__', '')}".rstrip(), True)
    for name, value in sorted(os.environ.items()):
        if name.startswith(PREFIXES):
            run.check(f"{name}={value}", True)


def device_and_world(run: StepRun) -> None:
    """The rank's device, a world of one, and a process without a GPU."""
    with run.part("LOCAL_RANK is the ordinal of the rank's device"):
        count = torch.cuda.device_count() if run.on_cuda else 0
        number, want = (count - 1, count - 1) if count > 1 else (3, 0 if count else None)
        with environment_of({"LOCAL_RANK": str(number)}):
            have = choose_device(run.device)
        run.check(f"LOCAL_RANK {number} of {count} devices", have.index == want, f"have {have}, want {want}")
        if count > 1:
            with environment_of({"LOCAL_RANK": str(count)}):
                refused = _is_refused(lambda: choose_device(run.device))
            run.check("a rank without a device is refused", refused)
    with run.part("a world of one"):
        device = choose_device(run.device)
        lone_world()
        mesh = init_device_mesh(run.device, (1,), mesh_dim_names=("dp",))
        if run.on_cuda:
            current = torch.cuda.current_device()
            run.check("a mesh leaves the current device", current == device.index, f"have {current}, want {device}")
        group = mesh.get_group("dp")
        value = torch.ones(4, device=device)
        dist.all_reduce(value, group=group)
        objects = [{"a": 1}]
        dist.broadcast_object_list(objects, 0)
        dist.barrier()
        new = dist.new_group([0])
        on_cpu = torch.ones(2)
        dist.all_reduce(on_cpu, group=new)
        run.check("collectives of tensors on device and CPU, and of objects", bool(value.sum() == 4) and objects != [])
    with run.part("a process that is shown no GPU runs on CPU"):
        code = "from core.device import choose_device; print(choose_device())"
        have_text = _python(code, {"CUDA_VISIBLE_DEVICES": ""})
        run.check("CUDA_VISIBLE_DEVICES empty gives cpu", have_text == "cpu", f"have {have_text!r}")


def _is_refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except Refused:
        return True
    return False


def _python(code: str, variables: Mapping[str, str]) -> str:
    process = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **variables}, capture_output=True, text=True, timeout=60
    )
    return process.stdout.strip() or process.stderr.strip()[-300:]
