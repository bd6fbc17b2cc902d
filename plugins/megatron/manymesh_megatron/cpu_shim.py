"""megatron-core on a machine without CUDA: inside `on_cpu()`, what it asks of CUDA is answered by the CPU.

megatron-core names CUDA literally (devices, streams, random states, tensor types) and uses collectives that gloo lacks.
No file of it is edited. Outside of the context nothing is changed; torch's function modes are of one thread.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.overrides import TorchFunctionMode

from core.errors import Refused

CPU = torch.device("cpu")
_MISSING = object()


@contextmanager
def on_cpu() -> Iterator[None]:
    """Raises Refused where CUDA is available: there megatron-core needs no help, and would get wrong answers."""
    if torch.cuda.is_available():
        raise Refused("the CPU shim is not for machines with CUDA", mend="ask for device 'cuda'")
    if isinstance(torch.overrides._get_current_function_mode(), _CudaIsCpu):
        yield  # a call within a call
        return
    originals = []
    try:
        for owner, name, value in _replacements():
            originals.append((owner, name, getattr(owner, name, _MISSING)))
            setattr(owner, name, value)
        with _CudaIsCpu():
            yield
    finally:
        for owner, name, value in reversed(originals):
            delattr(owner, name) if value is _MISSING else setattr(owner, name, value)


def _replacements() -> list[tuple[Any, str, Any]]:
    stream = _Stream()
    rng: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    moe: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")

    def give_stream(*_: Any, **__: Any) -> _Stream:
        return stream

    def rng_state(*_: Any, **__: Any) -> torch.Tensor:
        return torch.get_rng_state()

    replacements: list[tuple[Any, str, Any]] = [
        (torch.cuda, "current_device", lambda: CPU),
        (torch.cuda, "synchronize", lambda *_, **__: None),
        (torch.cuda, "manual_seed", torch.manual_seed),
        (torch.cuda, "get_rng_state", rng_state),
        (torch.cuda.random, "get_rng_state", rng_state),
        (rng, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state)),
        (torch.cuda, "Stream", _Stream),  # a class: modules imported meanwhile annotate with it
    ]
    replacements += [(torch.cuda, name, give_stream) for name in ("current_stream", "default_stream", "stream")]
    if not hasattr(moe, "te_general_gemm"):  # 0.16: a name that exists only with TransformerEngine, and is asked for
        replacements.append((moe, "te_general_gemm", None))
    return replacements


class _Stream:
    """Work on CPU is done when a call returns: there is nothing to wait for."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def _nothing(self, *_: Any, **__: Any) -> _Stream:
        return self

    wait_stream = synchronize = record_event = wait = wait_event = __enter__ = _nothing

    def __exit__(self, *_: Any) -> None:
        return None


def _names_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


class _CudaIsCpu(TorchFunctionMode):
    """Sends calls that name CUDA to the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        special = _SPECIAL.get(getattr(func, "__name__", ""))
        if special is not None:
            return special(self, func, args, kwargs)
        if kwargs:
            if _names_cuda(kwargs.get("device")):
                kwargs = kwargs | {"device": CPU}
            if kwargs.get("pin_memory"):
                kwargs = kwargs | {"pin_memory": False}
        return func(*args, **kwargs)


def _same(mode: _CudaIsCpu, func: Any, args: Any, kwargs: Any) -> Any:
    return args[0]


def _type(mode: _CudaIsCpu, func: Any, args: Any, kwargs: Any) -> Any:
    """Optimizers tell parameters apart by `param.type() == "torch.cuda.FloatTensor"`."""
    answer = func(*args, **kwargs)
    return answer.replace("torch.", "torch.cuda.", 1) if len(args) == 1 and not kwargs else answer


def _to(mode: _CudaIsCpu, func: Any, args: Any, kwargs: Any) -> Any:
    args = tuple(CPU if _names_cuda(arg) else arg for arg in args)
    return func(*args, **{name: CPU if _names_cuda(value) else value for name, value in kwargs.items()})


def _backward(mode: _CudaIsCpu, func: Any, args: Any, kwargs: Any) -> Any:
    """torch leaves the mode while it runs a function, and backward runs megatron's own: enter it again."""
    with mode, torch._C.DisableTorchFunctionSubclass():
        return _run_backward(*args, **kwargs)


def _run_backward(
    tensors: Any, grad_tensors: Any = None, retain_graph: bool | None = None, create_graph: bool = False, **_: Any
) -> None:
    # What torch.autograd.backward does, without its checks: that function would leave the mode again.
    tensors = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
    seeds = grad_tensors if isinstance(grad_tensors, tuple | list) else (grad_tensors,) * len(tensors)
    grads = tuple(torch.ones_like(t) if g is None else g for t, g in zip(tensors, seeds, strict=True))
    Variable._execution_engine.run_backward(
        tensors, grads, bool(retain_graph), create_graph, (), allow_unreachable=True, accumulate_grad=True
    )


def _all_to_all_single(mode: _CudaIsCpu, func: Any, args: Any, kwargs: Any) -> Any:
    """Split sizes that were to be copied from the GPU are still tensors."""

    def plain(value: Any) -> Any:
        return value.tolist() if isinstance(value, torch.Tensor) else value

    args = (*args[:2], *map(plain, args[2:4]), *args[4:])
    return func(*args, **{name: plain(value) if "sizes" in name else value for name, value in kwargs.items()})


def _all_gather(mode: _CudaIsCpu, func: Any, args: Any, kwargs: Any) -> Any:
    """gloo gathers only equal shapes; tokens of experts differ by rank."""
    parts, mine = args[:2]
    if len({part.shape for part in parts}) == 1:
        return func(*args, **kwargs)
    group = kwargs.get("group", args[2] if len(args) > 2 else None)
    for rank, part in enumerate(parts):
        if rank == dist.get_rank(group):
            part.copy_(mine)
        dist.broadcast(part, group=group, group_src=rank)
    return None


def _reduce_scatter(mode: _CudaIsCpu, func: Any, args: Any, kwargs: Any) -> Any:
    """As _all_gather."""
    mine, parts = args[:2]
    if len({part.shape for part in parts}) == 1:
        return func(*args, **kwargs)
    group = kwargs.get("group", args[3] if len(args) > 3 else None)
    for rank, part in enumerate(parts):
        total = part.clone()
        dist.all_reduce(total, group=group)
        if rank == dist.get_rank(group):
            mine.copy_(total)
    return None


_SPECIAL: dict[str, Callable[[_CudaIsCpu, Any, Any, Any], Any]] = {
    "cuda": _same,
    "pin_memory": _same,
    "type": _type,
    "to": _to,
    "backward": _backward,
    "all_to_all_single": _all_to_all_single,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
}
