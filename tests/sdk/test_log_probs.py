"""Log-probabilities and entropies, and their gradients, are those of log_softmax over the whole vocabulary."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from core.errors import Refused
from manymesh.parts.log_probs import token_outputs, vocab_log_probs
from sdk.testing import Worlds

CHUNKS = "manymesh.parts.log_probs.CHUNK_ELEMENTS"


def by_log_softmax(
    logits: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs and entropy of tokens 1.., and the gradient of both, weighted by (2, rows, tokens)."""
    logits = logits.detach().double().requires_grad_()
    log_softmax = (logits / temperature).log_softmax(-1)[:, :-1]
    log_probs = log_softmax.gather(-1, ids[:, 1:, None]).squeeze(-1)
    entropy = -(log_softmax.exp() * log_softmax.clamp(min=-1e9)).sum(-1)  # 0 * -inf is not a number
    (log_probs * weight[0, :, 1:] + entropy * weight[1, :, 1:]).sum().backward()
    assert logits.grad is not None
    return log_probs.detach().float(), entropy.detach().float(), logits.grad


def check(
    outputs: dict[str, torch.Tensor],
    gradient: torch.Tensor,
    want: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    tolerance: float = 1e-5,
) -> None:
    for name, value in zip(("log_probs", "entropy"), want, strict=False):
        assert outputs[name].dtype == torch.float32
        assert outputs[name][:, 0].eq(0).all()
        torch.testing.assert_close(outputs[name][:, 1:], value, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient.double(), want[2], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_a_whole_vocabulary(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, temperature: float) -> None:
    monkeypatch.setattr(CHUNKS, 40)  # several chunks
    torch.manual_seed(0)
    logits = torch.randn(2, 7, 11, dtype=dtype).mul(3).requires_grad_()
    ids, weight = torch.randint(0, 11, (2, 7)), torch.randn(2, 2, 7)
    outputs = token_outputs(logits, ids, temperature, entropy=True)
    (outputs["log_probs"] * weight[0] + outputs["entropy"] * weight[1]).sum().backward()
    assert logits.grad is not None
    assert logits.grad.dtype == dtype
    want = by_log_softmax(logits, ids, weight, temperature)
    check(outputs, logits.grad, want, 2e-2 if dtype == torch.bfloat16 else 1e-5)


def sharded(
    rank: int,
    world_size: int,
    logits: torch.Tensor,
    ids: torch.Tensor,
    weight: torch.Tensor,
    temperature: float,
    vocab_size: int,
    chunk: int = 40,
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """This rank's outputs, and the gradient of its part of the padded logits."""
    import manymesh.parts.log_probs as module

    module.CHUNK_ELEMENTS = chunk
    local = logits.chunk(world_size, -1)[rank].clone().requires_grad_()
    outputs = token_outputs(local, ids, temperature, entropy=True, group=dist.group.WORLD, vocab_size=vocab_size)
    (outputs["log_probs"] * weight[0] + outputs["entropy"] * weight[1]).sum().backward()
    assert local.grad is not None
    return {name: value.detach() for name, value in outputs.items()}, local.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("world_size", "padded", "vocab_size", "temperature"),
    [(2, 64, 64, 1.0), (2, 64, 61, 0.7), (4, 64, 61, 0.7), (4, 32, 7, 1.0)],  # 7: two ranks hold padding alone
)
def test_a_vocabulary_split_over_ranks_is_as_the_whole_one(
    on: Worlds, world_size: int, padded: int, vocab_size: int, temperature: float, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 9, padded).mul(3).to(dtype)
    logits[..., vocab_size:] = 100.0  # what padding holds must not matter
    ids, weight = torch.randint(0, vocab_size, (3, 9)), torch.randn(2, 3, 9)
    ids.view(-1)[:4] = torch.tensor([0, vocab_size - 1, padded // world_size - 1, padded // world_size]).clamp(
        max=vocab_size - 1
    )  # on the borders of the parts
    ranks = on(world_size, sharded, logits, ids, weight, temperature, vocab_size)
    want = by_log_softmax(logits[..., :vocab_size], ids, weight, temperature)
    gradient = torch.cat([each for _, each in ranks], -1)
    assert gradient.dtype == dtype
    assert gradient[..., vocab_size:].eq(0).all()
    for outputs, _ in ranks:
        check(outputs, gradient[..., :vocab_size], want, 2e-2 if dtype == torch.bfloat16 else 1e-5)
        assert all(torch.equal(outputs[name], ranks[0][0][name]) for name in outputs)


@pytest.mark.parametrize("case", ["one token", "extreme", "masked", "masked on a whole rank"])
def test_odd_logits_split_over_ranks(on: Worlds, case: str) -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 5, 8)
    ids = torch.randint(0, 4, (2, 5))
    if case == "one token":
        logits, ids = logits[:1, :1], ids[:1, :1]
    elif case == "extreme":
        logits = logits.sign() * 1e4 + torch.randint(0, 3, logits.shape)
    elif case == "masked":
        logits[..., 5] = logits[..., 7] = -torch.inf
    else:
        logits[..., 4:] = -torch.inf
    weight = torch.randn(2, *ids.shape)
    ranks = on(2, sharded, logits, ids, weight, 0.7, 8)
    whole = logits.clone().requires_grad_()
    one = token_outputs(whole, ids, 0.7, entropy=True)
    (one["log_probs"] * weight[0] + one["entropy"] * weight[1]).sum().backward()
    want = by_log_softmax(logits, ids, weight, 0.7)
    whole_gradient = torch.cat([each for _, each in ranks], -1)
    for outputs, gradient in ((ranks[0][0], whole_gradient), (ranks[1][0], whole_gradient), (one, whole.grad)):
        assert gradient is not None
        check(outputs, gradient, want)


def test_the_flat_form_shifts_nothing_and_gives_entropy_only_where_asked(on: Worlds) -> None:
    def job(rank: int, world_size: int, logits: torch.Tensor, targets: torch.Tensor) -> Any:
        return vocab_log_probs(logits.chunk(world_size, -1)[rank], targets, group=dist.group.WORLD)

    torch.manual_seed(0)
    logits, targets = torch.randn(6, 8), torch.randint(0, 8, (6,))
    want = logits.log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)
    for log_probs, entropy in [vocab_log_probs(logits, targets), *on(2, job, logits, targets)]:
        torch.testing.assert_close(log_probs, want)
        assert entropy is None


def test_ranks_meet_twice_a_call_however_many_chunks_and_never_in_backward(on: Worlds) -> None:
    def job(rank: int, world_size: int) -> list[tuple[int, ...]]:
        import manymesh.parts.log_probs as module

        shapes: list[tuple[int, ...]] = []
        real, chunk = dist.all_reduce, module.CHUNK_ELEMENTS

        def counted(tensor: torch.Tensor, *args: Any) -> Any:
            shapes.append(tuple(tensor.shape))
            return real(tensor, *args)

        dist_module: Any = dist
        dist_module.all_reduce, module.CHUNK_ELEMENTS = counted, 8
        try:
            logits = torch.randn(2, 6, 8, requires_grad=True)
            outputs = token_outputs(logits, torch.zeros(2, 6, dtype=torch.long), entropy=True, group=dist.group.WORLD)
            (outputs["log_probs"] + outputs["entropy"]).sum().backward()
        finally:
            dist_module.all_reduce, module.CHUNK_ELEMENTS = real, chunk
        return shapes

    assert on(2, job) == [[(12,), (3, 12)]] * 2


def test_what_does_not_fit_is_refused_on_every_rank(on: Worlds) -> None:
    def job(rank: int, world_size: int) -> None:
        logits, targets, group = torch.zeros(3, 4), torch.zeros(3, dtype=torch.long), dist.group.WORLD
        for wrong in (0, 9):
            with pytest.raises(Refused, match="vocab_size"):
                vocab_log_probs(logits, targets, group=group, vocab_size=wrong)
        with pytest.raises(Refused, match="targets"):
            vocab_log_probs(logits, targets[:2], group=group)
        for stranger in (-1, 7):  # 7 is padding
            with pytest.raises(RuntimeError, match=r"not in 0\.\.6"):
                vocab_log_probs(logits, targets + stranger, group=group, vocab_size=7)

    on(2, job)


def test_backward_keeps_no_second_copy_of_the_vocabulary() -> None:
    logits = torch.randn(4, 32, 1000, dtype=torch.bfloat16, requires_grad=True)
    sizes: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        token_outputs(logits, torch.randint(0, 1000, (4, 32)), 0.7, entropy=True)
    assert logits.nbytes <= sum(sizes.values()) < 1.05 * logits.nbytes


def several(
    rank: int, world_size: int, logits: torch.Tensor, ids: torch.Tensor, teacher_ids: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """top_log_probs, and the gradient of this rank's part of the logits."""
    local = logits.chunk(world_size, -1)[rank].clone().requires_grad_()
    group = dist.group.WORLD if world_size > 1 else None
    top = token_outputs(local, ids, 0.7, teacher_ids=teacher_ids, group=group, vocab_size=61)["top_log_probs"]
    (top * weight).sum().backward()
    assert local.grad is not None
    return top.detach(), local.grad


@pytest.mark.parametrize("world_size", [1, 2])
def test_top_log_probs_are_those_of_the_given_ids_wherever_the_vocabulary_is(on: Worlds, world_size: int) -> None:
    """Ids of one token may repeat, and their gradients add up."""
    torch.manual_seed(0)
    logits = torch.randn(3, 9, 64).mul(3)
    ids, teacher_ids, weight = torch.randint(0, 61, (3, 9)), torch.randint(0, 61, (3, 9, 4)), torch.randn(3, 9, 4)
    teacher_ids[..., 1] = teacher_ids[..., 0]
    whole = logits.clone().requires_grad_()
    table = (whole[..., :61] / 0.7).log_softmax(-1)[:, :-1]
    want = table.gather(-1, teacher_ids[:, 1:])
    (want * weight[:, 1:]).sum().backward()
    assert whole.grad is not None
    ranks = on(world_size, several, logits, ids, teacher_ids, weight)
    for top, _ in ranks:
        assert top[:, 0].eq(0).all()
        torch.testing.assert_close(top[:, 1:], want.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.cat([each for _, each in ranks], -1), whole.grad, atol=1e-5, rtol=1e-5)
