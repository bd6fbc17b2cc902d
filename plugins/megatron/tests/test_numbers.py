"""However the model is cut, log-probs, losses, gradients and steps are those of one process with transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron_steps import SLOW, train

from sdk.reference import DistillationLoss, PlainTrainer, make_batch, movement_error, with_teacher

LENGTHS = (40, 2, 17, 3, 25, 1, 9, 5, 31, 8, 12, 2, 22, 4, 6, 14)
BATCHES = [make_batch(LENGTHS, seed=seed, advantage=0.5) for seed in range(3)]

Case = tuple[int, str, dict[str, Any]]


def case(
    name: str, world_size: int, family: str = "qwen3", *, slow: bool = False, ci: bool = False, **options: Any
) -> Any:
    marks = [pytest.mark.slow] * slow + [pytest.mark.ci] * ci
    return pytest.param(world_size, family, options, id=name, marks=marks)


def sizes(tp: int = 1, pp: int = 1, vpp: int | None = None, cp: int = 1, ep: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "tensor_parallel": tp,
        "pipeline_parallel": pp,
        "virtual_pipeline": vpp,
        "context_parallel": cp,
        "expert_parallel": ep,
        **more,
    }


SP = {"sequence_parallel": True}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 20000}
PLAIN = {"distributed_optimizer": False}

CASES = [
    case("tp2", 2, "llama", **sizes(tp=2), slow=True),
    case("tp2 sp, packed", 2, **sizes(tp=2), **SP, packing=True),
    case("tp4, fewer key-value heads", 4, **sizes(tp=4), slow=True),
    case("tp2, vocabulary padded", 2, "qwen2", **sizes(tp=2), vocab_multiple=48, slow=True),
    case("tp2, no distributed optimizer", 2, **sizes(tp=2), **PLAIN, slow=True),
    case("pp2", 2, "qwen2", **sizes(pp=2), slow=True),
    case("pp2, packed", 2, **sizes(pp=2), packing=True, slow=True),
    case("pp4", 4, **sizes(pp=4), slow=True),
    case("pp2 of three layers", 2, "qwen3 of 3 layers", **sizes(pp=2), first_stage_layers=2, ci=True),
    case("pp2 vpp2", 2, **sizes(pp=2, vpp=2), ci=True),
    case("pp4 vpp2", 4, "qwen3 of 8 layers", **sizes(pp=4, vpp=2), slow=True),
    case("tp2 pp2, tied", 4, "qwen3 tied", **sizes(tp=2, pp=2)),
    case("tp2 sp pp2 vpp2", 4, "llama", **sizes(tp=2, pp=2, vpp=2), **SP, slow=True),
    case("tp2 pp2 dp2", 8, **sizes(tp=2, pp=2), slow=True),
    case("tp2 sp pp2 dp2", 8, **sizes(tp=2, pp=2), **SP, slow=True),
    case("dp2", 2, **sizes(), **PLAIN, slow=True),
    case("dp2, overlapped in small buckets", 2, **sizes(), **OVERLAP, ci=True),
    case("dp2 pp2, overlapped, tied", 4, "qwen3 tied", **sizes(pp=2), **OVERLAP, slow=True),
    case("dp2 pp2 vpp2, overlapped", 4, **sizes(pp=2, vpp=2), **OVERLAP, slow=True),
    case("cp2", 2, **sizes(cp=2)),
    case("cp2 tp2 sp dp2", 8, "llama", **sizes(cp=2, tp=2), **SP, slow=True),
    case("cp2 tp2 sp pp2", 8, **sizes(cp=2, tp=2, pp=2), **SP, slow=True),
    case("experts, ep2", 2, "qwen3_moe", **sizes(ep=2)),
    case("experts, normed", 2, "qwen3_moe normed", **sizes(ep=2), slow=True),
    case("experts, some layers dense", 2, "qwen3_moe mixed", **sizes(ep=2), slow=True),
    case("experts, ep2, allgather", 2, "qwen3_moe", **sizes(ep=2), moe_dispatcher="allgather", slow=True),
    case("experts, ep2 dp4", 4, "qwen3_moe", **sizes(ep=2), slow=True),
    case("experts, pp2 ep2", 4, "qwen3_moe", **sizes(pp=2, ep=2), slow=True),
    case("experts, tp2 sp etp1 ep2", 2, "qwen3_moe", **sizes(tp=2, ep=2), **SP, expert_tensor_parallel=1, ci=True),
    case("experts, tp2 sp etp2", 2, "qwen3_moe", **sizes(tp=2), **SP, slow=True),
    case("experts, tp2 sp ep2 etp2", 4, "qwen3_moe", **sizes(tp=2, ep=2), **SP, slow=True),
    case(
        "experts, tp2 sp ep2 etp2, allgather",
        4,
        "qwen3_moe",
        **sizes(tp=2, ep=2),
        **SP,
        moe_dispatcher="allgather",
        slow=True,
    ),
    case("experts, tp2 sp ep4 etp1", 4, "qwen3_moe", **sizes(tp=2, ep=4), **SP, expert_tensor_parallel=1, slow=True),
    case("experts, tp2 sp pp2 ep2", 8, "qwen3_moe", **sizes(tp=2, pp=2, ep=2), **SP, slow=True),
    case("all recomputed", 1, recompute="full", slow=True),
    case("all recomputed, tp2 sp pp2", 4, **sizes(tp=2, pp=2), **SP, recompute="full", slow=True),
    case("attention recomputed, tp2", 2, **sizes(tp=2), recompute="selective", slow=True),
    case("offloaded, dp2", 2, **sizes(), offload_parameters=True, offload_optimizer=True, slow=True),
    case("offloaded, tp2", 2, **sizes(tp=2), **PLAIN, offload_parameters=True, offload_optimizer=True, slow=True),
    case("value model, tp2 sp", 2, "value", **sizes(tp=2), **SP, ci=True),
    case("value model, pp2 cp2", 4, "value", **sizes(pp=2, cp=2), slow=True),
    case("value model, packed", 1, "value", packing=True, slow=True),
]

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3 of 3 layers": ("qwen3", {"num_layers": 3}),
    "qwen3 of 8 layers": ("qwen3", {"num_layers": 8}),
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe normed": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3_moe mixed": ("qwen3_moe", {"mlp_only_layers": [1], "intermediate_size": 96}),
    "value": ("qwen3", {"value_model": True}),
}


@pytest.fixture(scope="session")
def plain(model_dir: Callable[..., str]) -> Callable[[str], dict[str, Any]]:
    """The same steps by the plain loop, of each family once."""
    runs: dict[str, dict[str, Any]] = {}

    def of(name: str) -> dict[str, Any]:
        if name not in runs:
            family, options = FAMILIES[name]
            directory = model_dir(family, **options)
            trainer = PlainTrainer(directory, SLOW, value_model=family == "value" or "value_model" in options)
            start, outputs = trainer.weights(), trainer.outputs(BATCHES[0])
            runs[name] = {
                "directory": directory,
                "start": start,
                "outputs": {name: value.detach() for name, value in outputs.items()},
                "steps": [trainer.step(batch) for batch in BATCHES],
                "weights": trainer.weights(),
            }
        return runs[name]

    return of


@pytest.mark.parametrize(("world_size", "family", "options"), CASES)
def test_three_steps_equal_the_plain_loop(on, plain, world_size, family, options) -> None:
    """With at least four micro-batches a rank, unequal in rows and tokens."""
    want = plain(family)
    model_type = "value_model" if family == "value" else "language_model"
    ranks = on(world_size, train, want["directory"], BATCHES, model_type, **options)
    dp_size = 1 + max(rank["dp_rank"] for rank in ranks)
    collected = {rank["dp_rank"]: rank for rank in ranks if rank["collected"]}
    assert sorted(collected) == list(range(dp_size))
    for rank in ranks:
        assert rank["start"].keys() == want["start"].keys()
        assert all(torch.equal(rank["start"][name], each) for name, each in want["start"].items())
    per = len(LENGTHS) // dp_size
    for dp_rank, rank in collected.items():
        rows = slice(dp_rank * per, (dp_rank + 1) * per)
        for name, value in want["outputs"].items():
            have = rank["outputs"][name]
            torch.testing.assert_close(have, value[rows, : have.shape[1]], atol=1e-5, rtol=1e-5)
    for number, (loss, norm) in enumerate(want["steps"]):
        steps = [rank["steps"][number] for rank in collected.values()]
        assert sum(each["loss"] for each in steps) == pytest.approx(loss, rel=1e-5)
        assert all(each["grad_norm"] == pytest.approx(norm, rel=1e-5) for each in steps)
    for rank in ranks:
        assert movement_error(rank["weights"], want["weights"], want["start"]) < 1e-3


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(sizes(tp=2), id="tp2"),
        pytest.param(sizes(tp=2) | SP | {"packing": True}, id="tp2 sp, packed", marks=pytest.mark.ci),
        pytest.param(sizes(pp=2), id="pp2", marks=pytest.mark.ci),
        pytest.param(sizes(cp=2), id="cp2", marks=pytest.mark.ci),
    ],
)
def test_log_probs_of_a_teachers_ids_train_and_come_back_as_in_transformers(on, model_dir, options) -> None:
    """Jagged columns of (rows, tokens, k), through the worker."""
    batch, loss = with_teacher(make_batch(LENGTHS)), DistillationLoss()
    trainer = PlainTrainer(model_dir(), SLOW)
    outputs, start = trainer.outputs(batch)["top_log_probs"].detach(), trainer.weights()
    (_, norm), want = trainer.step(batch, loss), trainer.weights()
    loss_options: Any = {"loss": "sdk.reference:DistillationLoss", "outputs": loss.needs}
    ranks = on(2, train, model_dir(), [batch], **loss_options, **options)
    (collected,) = (rank["outputs"] for rank in ranks if rank["collected"])
    torch.testing.assert_close(collected["top_log_probs"], outputs, atol=2e-5, rtol=1e-4)
    for rank in ranks:
        assert movement_error(rank["weights"], want, start) < 1e-3
        assert rank["steps"][0]["grad_norm"] == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(sizes(tp=2), id="tp2"),
        pytest.param(sizes(tp=2) | SP, id="tp2 sp", marks=pytest.mark.ci),
        pytest.param(sizes(cp=2), id="cp2", marks=pytest.mark.ci),
    ],
)
def test_the_padding_token_in_a_row_trains_as_in_transformers(on, model_dir, options) -> None:
    """A policy may sample it. Its embedding is zero in a new model, and gets no gradient where it is read."""
    batch = make_batch(LENGTHS)
    batch["input_ids"][:, ::5] = 0  # tiny_model's pad_token_id
    directory = model_dir(tie_word_embeddings=True)
    trainer = PlainTrainer(directory, SLOW)
    start, (_, norm), want = trainer.weights(), trainer.step(batch), trainer.weights()
    for rank in on(2, train, directory, [batch], **options):
        assert rank["steps"][0]["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert movement_error(rank["weights"], want, start) < 1e-3
