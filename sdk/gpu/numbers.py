"""Steps 02 and 03: functions of their own, without an engine."""

from __future__ import annotations

import torch

from core.engine import WeightSpec
from manymesh.parts.log_probs import token_outputs
from manymesh.workers.transfer.buckets import Joiner, fill_buckets, plan
from manymesh.workers.transfer.digest import digest
from sdk.gpu.step import StepRun
from sdk.gpu.tools import GIB, peak_of, seconds_of

NUM_CHECKED = 64  # positions that are held against fp64
# Of log-probabilities; the logits are given, so bf16's own rounding is not in it.
ATOL = 2e-5
GRADIENT = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # relative to its norm, in the logits' dtype


def log_probabilities(run: StepRun) -> None:
    """Values against fp64, and what the largest usual micro-batch costs."""
    vocabulary, tokens = (151_936, 16_384) if run.on_cuda else (5_003, 256)
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        with run.part(f"{name} against log_softmax in fp64"):
            value_error, gradient_error = _errors(run, vocabulary, dtype)
            run.check(
                f"{name}: log-probs and entropy", value_error < ATOL, f"error {value_error:.2g}, want below {ATOL:g}"
            )
            run.check(
                f"{name}: gradient",
                gradient_error < GRADIENT[dtype],
                f"relative error {gradient_error:.2g}, want below {GRADIENT[dtype]:g}",
            )
    with run.part("time and memory"):
        _cost(run, vocabulary, tokens)


def _errors(run: StepRun, vocabulary: int, dtype: torch.dtype) -> tuple[float, float]:
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(1, NUM_CHECKED + 1, vocabulary, generator=generator)
    ids = torch.randint(0, vocabulary, (1, NUM_CHECKED + 1), generator=generator)
    here = logits.clone().to(run.device, dtype).requires_grad_()
    have = token_outputs(here, ids.to(run.device), 0.7, entropy=True)
    (have["log_probs"].sum() + 0.1 * have["entropy"].sum()).backward()

    exact = logits.to(dtype).double().requires_grad_()
    table = (exact[0, :-1] / 0.7).log_softmax(-1)
    log_probs = table.gather(-1, ids[0, 1:, None])[:, 0]
    entropy = -(table.exp() * table).sum(-1)
    (log_probs.sum() + 0.1 * entropy.sum()).backward()
    errors = [
        (have[name][0, 1:].detach().cpu().double() - want.detach()).abs().max().item()
        for name, want in (("log_probs", log_probs), ("entropy", entropy))
    ]
    assert here.grad is not None
    assert exact.grad is not None
    distance = (here.grad.cpu().double() - exact.grad).norm() / exact.grad.norm()
    return max(errors), distance.item()


def _cost(run: StepRun, vocabulary: int, tokens: int) -> None:
    logits = torch.randn(1, tokens, vocabulary, device=run.device, dtype=torch.bfloat16).requires_grad_()
    ids = torch.randint(0, vocabulary, (1, tokens), device=run.device)

    def forward() -> torch.Tensor:
        outputs = token_outputs(logits, ids, entropy=True)
        return outputs["log_probs"].sum() + outputs["entropy"].sum()

    def step() -> None:
        logits.grad = None
        forward().backward()

    there_and_back = seconds_of(run, step)
    run.figure("forward", 1e3 * seconds_of(run, forward), "ms", f"{tokens} tokens x {vocabulary}, bf16, with entropy")
    run.figure("forward and backward", 1e3 * there_and_back, "ms")
    if run.on_cuda:
        logits.grad = None
        peak, size = peak_of(run, step), logits.numel() * logits.element_size()
        run.check(
            "memory is the gradient and at most half a GiB",
            peak <= size + GIB // 2,
            f"{peak / GIB:.2f} GiB, of which the gradient {size / GIB:.2f}",
        )


def digests_and_buckets(run: StepRun) -> None:
    """Digests of odd sizes and offsets; a round trip of buckets, and one with a stream of its own."""
    data = torch.randint(0, 256, (3_000_001,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    there = data.to(run.device)
    with run.part("digests"):
        wrong = []
        for start in (0, 1, 7, 8, 16):
            for size in (0, 1, 7, 8, 1023, 1024, 1025, 999_983, 2_999_980):
                part = slice(start, start + size)
                if digest(data[part]).item() != digest(there[part]).item():
                    wrong.append((start, size))
        run.check(f"equal on cpu and {run.device}", not wrong, f"(offset, size) {wrong}" if wrong else "")
        big = torch.empty((GIB if run.on_cuda else 2**24,), dtype=torch.uint8, device=run.device)
        run.figure("digest", big.numel() / seconds_of(run, lambda: digest(big)) / 1e9, "GB/s")
    with run.part("buckets"):
        tensors = _tensors(run)
        run.check("cut and joined", _same(tensors, _joined(run, tensors)))
    with run.part("buckets on two streams"):
        run.need_cuda()
        first, second = torch.cuda.Stream(), torch.cuda.Stream()
        first.wait_stream(torch.cuda.current_stream())
        second.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(first):
            one = _joined(run, tensors)
        with torch.cuda.stream(second):
            other = _joined(run, tensors)
        torch.cuda.synchronize()
        run.check("both are whole", _same(tensors, one) and _same(tensors, other))


def _tensors(run: StepRun) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"a": (1000, 333), "b": (7,), "c": (0,), "d": (513, 129), "e": (1,)}
    tensors = {name: torch.randn(shape, generator=generator).to(run.device) for name, shape in shapes.items()}
    return tensors | {"half": torch.randn(777, 31, generator=generator).to(run.device, torch.bfloat16)}


def _joined(run: StepRun, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    specs = [WeightSpec(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in tensors.items()]
    buckets = plan(specs, 100_000)
    joiner = Joiner(specs, run.device)
    come: dict[str, torch.Tensor] = {}
    for bucket, pieces in zip(buckets, fill_buckets(specs, buckets, tensors.items()), strict=True):
        # As a transfer hands them over: copies, not the sender's memory.
        come.update(joiner.add(bucket, [piece.clone() for piece in pieces]))
    return come


def _same(have: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> bool:
    return have.keys() == want.keys() and all(torch.equal(have[name], want[name]) for name in want)
