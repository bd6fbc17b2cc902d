"""The configs of examples/gpu can be run by their planners, and fit their GPUs by their backends' estimates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from core.config import left_to_device
from core.group import RayClassWithInitArgs
from core.memory import Phase
from core.registry import EngineRegistry
from manymesh.recipes.grpo import launch
from manymesh.recipes.grpo.config import GrpoConfig
from manymesh.recipes.grpo.memory import GIB, RESERVE, Moment, largest_micro_batch, unknown_parts, worst_moments
from manymesh.recipes.grpo.placement import Placement
from manymesh.recipes.yaml_config import load_yaml, override
from manymesh.workers.micro_batch import MicroBatchConfig, plan_micro_batches
from tests.support.public_models import write_config

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "gpu"
# Which public models each file is for, how many GPUs it takes, and how many GiB each has.
MODELS = {
    "1b_1gpu": (("Llama-3.2-1B",), 1, 80),
    "8b_8gpus": (("Llama-3.1-8B", "Qwen3-8B"), 8, 80),
    "8b_2nodes": (("Llama-3.1-8B", "Qwen3-8B"), 16, 80),
    "30b_a3b_8gpus": (("Qwen3-30B-A3B",), 8, 140),
    "30b_a3b_2nodes": (("Qwen3-30B-A3B",), 16, 80),
    "70b_8nodes": (("Llama-3.1-70B",), 64, 80),
}
EVERY = [(file, model) for file, (models, _, _) in MODELS.items() for model in models]


def placement_of(file: str, model: str, directory: Path, *overrides: str) -> Placement:
    path = write_config(model, directory / model)
    data = override(load_yaml(FOLDER / f"{file}.yaml"), [f"model.path={path}", *overrides])
    return Placement(GrpoConfig.of(data), elsewhere=True)  # vLLM need not be here


def moments_of(placement: Placement, gib: int = 80) -> dict[str, Moment]:
    moments_of_pools = worst_moments(placement, "cuda", gib * GIB)
    return {f"{pool} {each.name}": each for pool, moments in moments_of_pools.items() for each in moments}


def test_every_file_is_here() -> None:
    assert {file.stem for file in FOLDER.glob("*.yaml")} == MODELS.keys()


@pytest.mark.parametrize(("file", "model"), EVERY)
def test_it_is_planned_and_fits_its_gpus_in_every_moment(file: str, model: str, tmp_path: Path) -> None:
    placement = placement_of(file, model, tmp_path)
    placement.check()
    _, num_gpus, gib = MODELS[file]
    assert placement.config.world_size == num_gpus
    assert unknown_parts(placement) == []
    moments = moments_of(placement, gib)
    assert {"pool build the policy", "pool log-probs", "pool update"} <= moments.keys()
    for name, moment in moments.items():
        assert moment.total + RESERVE <= gib * GIB, f"{name}: {moment}"
    most = max(each.total for each in moments.values())
    assert most > gib / 2 * GIB, "smaller GPUs, or larger micro-batches, would do"


@pytest.mark.parametrize(("file", "model"), EVERY)
def test_its_settings_are_those_of_a_real_model(file: str, model: str, tmp_path: Path) -> None:
    config = placement_of(file, model, tmp_path).config
    actor, rollout = (
        EngineRegistry.get(part.backend, kind).config({"model": "m", **part.engine})
        if kind == "engine"
        else EngineRegistry.default().find(part.backend, kind, elsewhere=True).config({"model": "m", **part.engine})
        for part, kind in ((config.actor, "engine"), (config.rollout, "rollout"))
    )
    assert actor.optimizer.lr <= 5e-6
    assert left_to_device(rollout, "cuda")["dtype"] == "bfloat16"
    assert "bfloat16" in left_to_device(actor, "cuda").values()
    assert getattr(actor, "gradient_checkpointing", False) or actor.recompute == "full"
    prompt = config.data.max_prompt_tokens
    assert prompt is not None
    assert rollout.max_model_len >= prompt + config.sampling.max_new_tokens
    assert config.rollout.release_after_generate is (config.rollout_pool is None)


def test_processes_start_with_the_variables_that_their_backends_want(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[dict[str, str]] = []

    @contextmanager
    def pool(*_: Any, **__: Any) -> Iterator[Any]:
        yield SimpleNamespace(cpus_per_process=2.0, num_gpus=0.0)

    def group(*_: Any, env: dict[str, str], **__: Any) -> Any:
        started.append(env)
        return SimpleNamespace(shutdown=lambda **_: None)

    monkeypatch.setattr("core.transport.ray.RayResourcePool", pool)
    monkeypatch.setattr("core.transport.ray.RayWorkerGroup", group)
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    megatron = placement_of("70b_8nodes", "Llama-3.1-70B", tmp_path)
    users = placement_of("70b_8nodes", "Llama-3.1-70B", tmp_path, f"pool.env.{name}='8'")
    for placement in (megatron, users, placement_of("8b_8gpus", "Llama-3.1-8B", tmp_path)):
        with launch._group(RayClassWithInitArgs(object), placement, "actor", "g"):
            pass
    assert [env.get(name) for env in started] == ["1", "8", None]
    assert {env["OMP_NUM_THREADS"] for env in started} == {"2"}


def test_the_demos_name_no_gpu_command_and_the_pages_name_these(tmp_path: Path) -> None:
    for file in (ROOT / "examples/grpo").glob("*.yaml"):
        text = file.read_text()
        assert "use_gpu=null" not in text, file.name
        assert "bfloat16" not in text, file.name
    readme, page = (ROOT / "README.md").read_text(), (ROOT / "docs/gpu.md").read_text()
    assert "(examples/gpu)" in readme
    for name in MODELS:
        assert f"examples/gpu/{name}.yaml" in page


def test_the_page_on_gpus_has_the_figures_of_the_estimate(tmp_path: Path) -> None:
    page = (ROOT / "docs/gpu.md").read_text()
    for file, (models, _, gib) in MODELS.items():
        moments = moments_of(placement_of(file, models[0], tmp_path), gib)
        figures = []
        for name in ("generate", "log-probs", "update", "weights"):
            by_pool = [moments[f"{pool} {name}"] for pool in ("pool", "rollout_pool") if f"{pool} {name}" in moments]
            figures.append(" and ".join(f"{moment.total / GIB:.0f}" for moment in by_pool))
        line = f"| [{file}](../examples/gpu/{file}.yaml), {models[0]} | {' | '.join(figures)} |"
        assert line in page


def test_what_a_rollout_gives_back_is_there_for_the_update(tmp_path: Path) -> None:
    keeps = moments_of(placement_of("8b_8gpus", "Llama-3.1-8B", tmp_path, "rollout.release_after_generate=false"))
    gives = moments_of(placement_of("8b_8gpus", "Llama-3.1-8B", tmp_path))
    assert keeps["pool generate"] == gives["pool generate"]
    rollout = keeps["pool update"].parts["rollout"]
    assert keeps["pool update"].total - gives["pool update"].total == rollout.total > 30 * GIB
    assert gives["pool weights"].parts["rollout"].kv_cache == 0
    assert gives["pool weights"].parts["rollout"].parameters == rollout.parameters


def test_a_run_without_a_backends_estimate_counts_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    placement = placement_of("8b_8gpus", "Llama-3.1-8B", tmp_path)
    registry: Any = EngineRegistry.default()
    backend = registry.find("fsdp")
    without = attrs.evolve(backend, manifest=attrs.evolve(backend.manifest, memory=None))
    monkeypatch.setattr(registry, "entries", tuple(without if e == backend else e for e in registry.entries))
    assert unknown_parts(placement) == ["actor"]
    moments = moments_of(placement)
    assert moments["pool update"].parts.keys() == {"rollout"}
    assert moments["pool generate"].parts["rollout"].phase is Phase.GENERATE


@pytest.mark.parametrize(
    ("options", "row", "rows", "want"),
    [
        ({}, 1000, 64, (16384, 4)),  # 16 rows at once, and shorter ones fill the rest
        ({}, 20000, 3, (20000, 3)),
        ({"max_rows": 2}, 1000, 8, (2000, 4)),
        ({"max_tokens": None, "max_rows": 4}, 100, 8, (400, 2)),
        ({"max_tokens": None}, 100, 8, (800, 1)),
        ({}, 100, 8, (800, 1)),
    ],
)
def test_the_largest_micro_batch_is_the_planners(
    options: dict[str, Any], row: int, rows: int, want: tuple[int, int]
) -> None:
    config = MicroBatchConfig(**options)
    tokens, number = largest_micro_batch(config, row, rows)
    assert (tokens, number) == want
    planned = plan_micro_batches([row] * rows, config)
    assert len(planned) == number
    assert max(len(part) for part in planned) * row <= tokens
