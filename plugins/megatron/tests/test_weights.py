"""Weights cross by the names that save_pretrained writes, whatever megatron-core calls them and wherever they lie."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from named_models import SIZES, built, differing, random_dir, saved

BASE = [("qwen3", "tp2 pp2"), ("tied", "pp2 vpp2"), ("qwen3_moe", "tp2 ep2 etp2")]
ALL = [
    *[("qwen3", sizes) for sizes in ("dp4", "tp4", "pp2", "tp2 pp2", "pp2 vpp2")],
    *[("tied", sizes) for sizes in ("tp2", "tp2 pp2", "pp2 vpp2")],
    *[("qwen2", "tp2"), ("qwen2", "tp4"), ("llama", "tp2 pp2"), ("llama", "tp2, dp inside"), ("qwen3_moe", "dp4")],
    *[("qwen3_moe", sizes) for sizes in SIZES if "ep" in sizes or "etp" in sizes],
]
CASES = [pytest.param(*each, marks=[] if each in BASE else pytest.mark.ci) for each in ALL]


@pytest.mark.parametrize(("family", "sizes"), CASES)
def test_what_is_read_is_exported_to_the_bit(on, model_dir, family, sizes) -> None:
    path = random_dir(model_dir, family)

    def job(rank: int, world_size: int) -> None:
        with built(path, sizes) as model:
            model.weights.read_directory(path)
            stream, want, specs = list(model.weights.export("all")), saved(path), model.weights.specs()
            assert differing(dict(stream), want) == []
            assert [name for name, _ in stream] == [spec.name for spec in specs]
            assert all(each.is_contiguous() for _, each in stream)
            assert {(each.name, each.shape, each.dtype) for each in specs} == {
                (name, tuple(each.shape), "float32") for name, each in want.items()
            }

    on(4, job)


@pytest.mark.parametrize(("family", "sizes"), CASES)
def test_a_stream_from_another_model_replaces_every_weight(on, model_dir, family, sizes) -> None:
    path, other = random_dir(model_dir, family), random_dir(model_dir, family, seed=1)

    def job(rank: int, world_size: int) -> None:
        want = saved(other)

        def one_buffer() -> Iterator[tuple[str, torch.Tensor]]:
            buffer = torch.empty(100_000)
            for name, tensor in want.items():
                yield name, buffer[: tensor.numel()].view(tensor.shape).copy_(tensor)

        with built(path, sizes) as model:
            model.weights.read_directory(path)
            model.weights.load(one_buffer())
            assert differing(dict(model.weights.export("all")), want) == []

    on(4, job)


@pytest.mark.parametrize(("family", "sizes"), [("qwen3", "tp2 pp2"), ("qwen3_moe", "tp2 ep2 etp2")])
def test_bfloat16_keeps_its_bits(on, model_dir, family, sizes) -> None:
    path = random_dir(model_dir, family, dtype=torch.bfloat16)

    def job(rank: int, world_size: int) -> None:
        with built(path, sizes, dtype="bfloat16") as model:
            model.weights.read_directory(path)
            assert differing(dict(model.weights.export("all")), saved(path)) == []
            assert {spec.dtype for spec in model.weights.specs()} == {"bfloat16"}

    on(4, job)


def test_layers_come_in_order_and_what_rollouts_fuse_comes_together(on, model_dir) -> None:
    path = random_dir(model_dir, "qwen3_moe")

    def job(rank: int, world_size: int) -> list[Any]:
        with built(path, "pp2 vpp2 ep2") as model:
            return list(model.weights.specs())

    specs, *others = on(4, job)
    assert all(each == specs for each in others)
    names = [spec.name for spec in specs]
    assert (names[0], names[-2:]) == ("model.embed_tokens.weight", ["model.norm.weight", "lm_head.weight"])
    layers = [int(match[1]) for name in names if (match := re.search(r"layers\.(\d+)", name))]
    assert layers == sorted(layers)
    together: dict[str, list[int]] = {}
    for position, spec in enumerate(specs):
        if spec.together:
            together.setdefault(spec.together, []).append(position)
    assert len(together) == 4 * (1 + 4)  # layers x (attention, experts)
    assert all(each == list(range(each[0], each[0] + len(each))) for each in together.values())


@pytest.mark.parametrize(
    ("family", "sizes"), [("qwen3", "pp2 vpp2"), ("qwen3", "tp2, dp inside"), ("qwen3_moe", "pp2 ep2")]
)
def test_only_the_first_rank_is_given_tensors_where_asked(on, model_dir, family, sizes) -> None:
    path = random_dir(model_dir, family)

    def job(rank: int, world_size: int) -> None:
        with built(path, sizes) as model:
            model.weights.read_directory(path)
            exports = dict(model.weights.export("first"))
            assert list(exports) == [spec.name for spec in model.weights.specs()]
            if rank == 0:
                assert differing(exports, saved(path)) == []
            else:
                assert all(each.numel() == 0 for each in exports.values())

    on(4, job)


def test_replicas_of_what_leads_to_the_first_rank_exchange_nothing(on, model_dir) -> None:
    path = random_dir(model_dir, "qwen3")

    def job(rank: int, world_size: int) -> int:
        import torch.distributed as dist

        calls = []

        def counted(real: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args, **options: (calls.append(real), real(*args, **options))[1]

        with built(path, "pp2 vpp2") as model, pytest.MonkeyPatch.context() as patch:
            for name in ("send", "recv", "gather", "broadcast", "all_gather_into_tensor"):
                patch.setattr(dist, name, counted(getattr(dist, name)))
            for _ in model.weights.export("first"):
                pass
        return len(calls)

    of_second_stage = 2 * 8 + 2  # parameters of two layers, last norm, head
    assert on(4, job) == [of_second_stage, 0, of_second_stage, 0]


@pytest.mark.parametrize("sizes", ["dp4", "tp2", "pp2"])
def test_exported_tensors_are_the_receivers_own(on, model_dir, sizes) -> None:
    path = random_dir(model_dir, "qwen3")

    def job(rank: int, world_size: int) -> None:
        with built(path, sizes) as model:
            model.weights.read_directory(path)
            exports = dict(model.weights.export("all"))
            for each in model.parameters.values():
                each.fill_(torch.nan)
            assert differing(exports, saved(path)) == []
            for each in exports.values():
                each.zero_()
            assert model.unchanged()
            assert len({each.untyped_storage().data_ptr() for each in exports.values()}) == len(exports)

    on(4, job)


def test_the_last_stage_has_a_copy_of_tied_embeddings(on, model_dir) -> None:
    path = random_dir(model_dir, "tied")

    def job(rank: int, world_size: int) -> list[torch.Tensor]:
        with built(path, "pp2 vpp2") as model:
            model.weights.read_directory(path)
            assert "lm_head.weight" not in [spec.name for spec in model.weights.specs()]
            return [each for name, each in model.parameters.items() if "embeddings" in name or "output_layer" in name]

    want = saved(path)["model.embed_tokens.weight"]
    assert all(torch.equal(each, want) for [each] in on(4, job))


@pytest.mark.parametrize("sizes", ["dp4", "tp2 pp2"])
def test_padding_of_the_vocabulary_is_zeros_and_never_exported(on, model_dir, sizes) -> None:
    path = random_dir(model_dir, "qwen3", vocab_size=50)

    def job(rank: int, world_size: int) -> list[torch.Tensor]:
        with built(path, sizes, vocab_multiple=64) as model:
            model.weights.read_directory(path)
            exports = dict(model.weights.export("all"))
            model.weights.load(iter(exports.items()))
            assert differing(exports, saved(path)) == []
            return [each for name, each in model.parameters.items() if name.endswith("output_layer.weight")]

    heads = [head for heads in on(4, job) for head in heads]
    assert heads
    assert all(torch.equal(head[50:], torch.zeros_like(head[50:])) for head in heads if head[0].any())
    if sizes == "tp2 pp2":  # rows 64 to 127
        assert [bool(head.any()) for head in heads] == [True, False]


@pytest.mark.parametrize("sizes", ["dp4", "tp2 pp2"])
def test_a_value_head_is_saved_as_score(on, model_dir, tmp_path, sizes) -> None:
    from transformers import AutoModelForTokenClassification

    language_model = random_dir(model_dir, "qwen3")
    value_model = AutoModelForTokenClassification.from_pretrained(language_model, num_labels=1)
    torch.nn.init.normal_(value_model.score.bias)
    value_model.save_pretrained(tmp_path)

    def job(rank: int, world_size: int) -> None:
        with built(language_model, sizes, value_head=True) as model:
            model.weights.read_directory(language_model)
            exports = dict(model.weights.export("all"))
            fresh = {name: exports.pop(name) for name in ("score.weight", "score.bias")}
            assert all(each.isnan().all() for each in fresh.values())  # left as they were
            want = saved(language_model)
            assert differing(exports, {name: each for name, each in want.items() if name != "lm_head.weight"}) == []
            model.weights.read_directory(str(tmp_path))
            assert differing(dict(model.weights.export("all")), saved(tmp_path)) == []

    on(4, job)
