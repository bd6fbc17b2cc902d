"""Configs: what is wrong is named before any process starts."""

from __future__ import annotations

import json
import socket
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import attrs
import pytest

import core.transport.ray
from core.errors import ConfigError, Refused
from core.manifest import Plan
from core.registry import Backend
from manymesh.recipes import demo
from manymesh.recipes.grpo import launch
from manymesh.recipes.grpo.__main__ import main
from manymesh.recipes.grpo.config import GrpoConfig
from manymesh.recipes.grpo.launch import need_cluster
from manymesh.recipes.grpo.placement import Placement
from manymesh.recipes.grpo.run_directory import changed
from manymesh.recipes.grpo.trainer import GrpoTrainer
from manymesh.recipes.grpo.workers import Workers
from manymesh.recipes.yaml_config import laid_over
from manymesh.workers import Role


@pytest.fixture
def plain(toy: Path, tmp_path: Path) -> Any:
    """A whole config as plain data, for two processes."""
    return {
        "model": {"path": str(toy / "model")},
        "data": {"path": str(toy / "copy.jsonl")},
        "reward": {"function": "manymesh.recipes.grpo.reward:digit_share"},
        "pool": {"processes": [2], "use_gpu": False},
        "actor": {"engine": {"optimizer": {"lr": 3e-3}}},
        "sampling": {"num_samples": 4, "max_new_tokens": 4},
        "algorithm": {"prompts_per_step": 4},
        "run": {"dir": str(tmp_path / "run"), "steps": 2},
    }


def with_value(plain: dict[str, Any], path: str, value: Any) -> Any:
    out = json.loads(json.dumps(plain))
    *parents, last = path.split(".")
    node = out
    for key in parents:
        node = node.setdefault(key, {})
    node[last] = value
    return out


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("sampling.temprature", 1.0, "did you mean 'temperature'?"),
        ("algoritm", {}, "did you mean 'algorithm'?"),
        ("loss.kl_coeff", 0.1, "did you mean 'kl_coef'?"),
        ("actor.micro_batch.max_token", 10, "did you mean 'max_tokens'?"),
        ("run.steps", "ten", "run.steps"),
        ("run.steps", 0, "at least 1"),
        ("run.keep_last", 0, "at least 1"),
        ("sampling.temperature", 0, "greedy"),
        ("sampling.num_samples", 1, "at least 2"),
        ("sampling.top_p", 2.0, "top_p"),
        ("data.overlong", "cut", "data.overlong"),
        ("algorithm.epochs", 0, "epochs"),
        ("actor.loss", {"factory": "a:b"}, "set under `loss`"),
    ],
)
def test_a_wrong_key_or_value_is_named_with_its_path_and_the_nearest_legal_one(
    plain: dict[str, Any], path: str, value: Any, says: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        GrpoConfig.of(with_value(plain, path, value))
    assert says in str(refused.value)


def test_a_missing_section_is_named(plain: dict[str, Any]) -> None:
    del plain["model"]
    with pytest.raises(ConfigError, match="model"):
        GrpoConfig.of(plain)


def test_the_model_s_directory_is_handed_to_every_part_that_names_none(plain: dict[str, Any], toy: Path) -> None:
    plain["rollout"] = {"engine": {"model": "/elsewhere"}}
    plain["loss"] = {"kl_coef": 0.1, "clip_high": 0.28}
    worker: Any = Placement(GrpoConfig.of(plain)).worker()
    assert worker.role is Role.ACTOR_ROLLOUT_REF
    assert worker.actor.engine == {"model": str(toy / "model"), "optimizer": {"lr": 3e-3}}
    assert worker.ref.engine["model"] == str(toy / "model")
    assert worker.rollout.engine["model"] == "/elsewhere"
    assert worker.actor.loss.options["clip_high"] == 0.28
    assert {part.device for part in (worker.actor, worker.ref, worker.rollout)} == {"cpu"}


def test_without_kl_there_is_no_reference_policy(plain: dict[str, Any]) -> None:
    worker = Placement(GrpoConfig.of(plain)).worker()
    assert (worker.role, worker.ref) == (Role.ACTOR_ROLLOUT, None)


@pytest.mark.parametrize(
    ("prompts", "mini_batches", "legal"),
    [(3, 1, "2 or 4"), (5, 1, "4 or 6"), (1, 1, "2"), (6, 8, "4 or 8"), (4, 3, "6")],
)
def test_prompts_that_do_not_divide_are_refused_with_the_legal_neighbours(
    plain: dict[str, Any], prompts: int, mini_batches: int, legal: str
) -> None:
    plain["algorithm"] = {"prompts_per_step": prompts, "num_mini_batches": mini_batches}
    with pytest.raises(ConfigError) as refused:
        Placement(GrpoConfig.of(plain)).check()
    assert f"prompts_per_step {legal} (" in str(refused.value.want)


@pytest.mark.parametrize(("prompts", "mini_batches"), [(2, 1), (4, 8), (6, 3), (6, 12)])
def test_prompts_that_divide_are_taken(plain: dict[str, Any], prompts: int, mini_batches: int) -> None:
    plain["algorithm"] = {"prompts_per_step": prompts, "num_mini_batches": mini_batches}
    Placement(GrpoConfig.of(plain)).check()


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("model.path", "/no/such/model", "there is no model directory"),
        ("actor.backend", "fsdq", "fsdp"),
        ("rollout.backend", "hg", "hf"),
        ("actor.engine.optimiser", {}, "optimizer"),
        ("reward.function", "nowhere:f", "nowhere"),
        ("data.path", "/no/data.jsonl", "cannot read the data file"),
        ("data.chat", True, "no chat template"),
        ("run.dir", "/dev/null/run", "cannot make the run's directory"),
    ],
)
def test_what_a_run_would_stumble_over_is_refused_before_it_starts(
    plain: dict[str, Any], path: str, value: Any, says: str
) -> None:
    with pytest.raises(Refused) as refused:
        GrpoTrainer(GrpoConfig.of(with_value(plain, path, value)))
    assert says in str(refused.value)


def test_plugins_that_cannot_share_an_environment_are_refused_before_a_process_starts(
    plain: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    need = {"manymesh-fsdp": ["torch==2.4"], "manymesh-hf": ["torch>=2.6"]}
    monkeypatch.setattr("importlib.metadata.requires", need.__getitem__)
    with pytest.raises(Refused, match="manymesh-fsdp and manymesh-hf cannot share an environment"):
        Placement(GrpoConfig.of(plain)).check()


def test_a_directory_that_holds_a_run_is_not_written_over(plain: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(Refused, match="already holds a run") as refused:
        GrpoTrainer(GrpoConfig.of(plain))
    assert "--resume" in refused.value.mend
    GrpoTrainer(GrpoConfig.of(plain), resume=True)


def test_the_command_prints_an_error_without_traceback_and_exits_1(
    plain: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps(plain))  # JSON is YAML
    assert main(["--config", str(file), "model.path=/no/such/model"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: there is no model directory '/no/such/model'")
    assert "Traceback" not in error

    assert main(["--config", str(file), "model.path=/no/such/model", "--verbose"]) == 1
    assert "Traceback" in capsys.readouterr().err

    assert main(["--config", str(tmp_path / "none.yaml")]) == 1
    assert "none.yaml" in capsys.readouterr().err

    with pytest.raises(SystemExit) as usage:
        main([])
    assert usage.value.code == 2


def test_a_config_is_laid_over_another_key_by_key() -> None:
    under = {"a": {"b": 1, "c": {"d": 2}}, "e": [1, 2]}
    assert laid_over(under, {"a": {"c": {"d": 3, "f": 4}}, "e": [5]}) == {
        "a": {"b": 1, "c": {"d": 3, "f": 4}},
        "e": [5],
    }
    assert laid_over(under, {"a": None}) == {"a": None, "e": [1, 2]}
    assert under["a"] == {"b": 1, "c": {"d": 2}}


def test_the_demo_takes_another_config_over_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "over.yaml").write_text("actor: {engine: {tensor_parallel: 2}}")
    monkeypatch.chdir(tmp_path)
    assert demo.main(["--config", "over.yaml"]) == 1
    assert "unknown key 'tensor_parallel'" in capsys.readouterr().err  # of the demo's backend


def test_what_differs_between_two_configs_is_told_by_path() -> None:
    before = {"a": {"b": 1, "c": [1]}, "d": None, "gone": 1}
    assert changed(before, {"a": {"b": 2, "c": [1]}, "d": {"e": 1}}) == [
        "a.b: 1 -> 2",
        "d: None -> {'e': 1}",
        "gone: 1 -> None",
    ]
    assert changed(before, before) == []


def test_a_cluster_s_address_where_nobody_answers_is_refused_at_once() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(Refused, match=address) as refused:
            need_cluster(address)
        assert refused.value.where == "RAY_ADDRESS"
        silent.listen()
        need_cluster(address)
    need_cluster("auto")


def test_two_runs_at_once_do_not_share_a_directory(plain: dict[str, Any]) -> None:
    config = GrpoConfig.of(plain)
    first = GrpoTrainer(config)
    with pytest.raises(Refused, match="another run is writing"):
        GrpoTrainer(config)
    first.directory.release()
    GrpoTrainer(config)


def test_prompts_that_do_not_fit_the_models_context_are_refused_before_the_start(plain: dict[str, Any]) -> None:
    sampling = {**plain["sampling"], "max_new_tokens": 10_000}
    with pytest.raises(Refused, match="no room in the model's context"):
        GrpoTrainer(GrpoConfig.of({**plain, "sampling": sampling}))


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("pool.env", {"CUDA_VISIBLE_DEVICES": "0"}, "sets CUDA_VISIBLE_DEVICES, which the group sets"),
        ("rollout_pool", {"use_gpu": False, "env": {"RANK": "0"}}, "sets RANK, which the group sets"),
        ("pool.start_timeout_s", 0, "illegal start_timeout_s"),
        ("pool.call_timeout_s", -1, "illegal call_timeout_s"),
        ("pool.shutdown_timeout_s", 0, "illegal shutdown_timeout_s"),
        ("pool.gpus_per_process", 0, "illegal gpus_per_process"),
    ],
)
def test_a_pools_variables_and_deadlines_are_checked_before_a_process_starts(
    plain: dict[str, Any], path: str, value: Any, says: str
) -> None:
    with pytest.raises(Refused, match=says):
        Placement(GrpoConfig.of(with_value(plain, path, value))).check()


def test_a_pool_gives_each_process_as_many_gpus_as_its_backends_use(
    plain: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = Backend.plan

    def wide(self: Backend, options: Any, world_size: int, model: Any) -> Plan | None:
        plan = planned(self, options, world_size, model)
        return attrs.evolve(plan, gpus_per_process=4) if plan and self.kind == "rollout" else plan

    def placement(**values: Any) -> Placement:
        return Placement(GrpoConfig.of({**plain, **values}))

    assert placement(pool={"processes": [2]}).gpus_per_process("actor") == 1
    assert placement(pool={"processes": [2], "gpus_per_process": 2}).gpus_per_process("actor") == 2
    monkeypatch.setattr(Backend, "plan", wide)
    assert placement(pool={"processes": [2]}).gpus_per_process("actor") == 4  # the rollout lives there too
    apart = placement(pool={"processes": [2]}, rollout_pool={"processes": [1]})
    assert (apart.gpus_per_process("actor"), apart.gpus_per_process("rollout")) == (1, 4)
    with pytest.raises(Refused, match="a process of the rollout uses 4 GPUs") as refusal:
        placement(pool={"processes": [2]}, rollout_pool={"gpus_per_process": 2}).check()
    assert refusal.value.where == "rollout_pool"
    placement(pool={"processes": [2]}, rollout_pool={"gpus_per_process": 2, "use_gpu": False}).check()


def test_pool_options_reach_the_group_and_its_processes(plain: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {}

    class Pool(nullcontext[Any]):
        cpus_per_process = 6.0

        def __init__(self, processes: Any, **options: Any) -> None:
            super().__init__(self)
            told["pool"] = options
            self.num_gpus = float(bool(options["use_gpu"]))

    class Group:
        def __init__(self, room: Any, worker: Any, **options: Any) -> None:
            told["group"] = options

        def shutdown(self, **options: Any) -> None:
            told["shutdown"] = options

    monkeypatch.setattr(core.transport.ray, "RayResourcePool", Pool)
    monkeypatch.setattr(core.transport.ray, "RayWorkerGroup", Group)
    monkeypatch.setattr(launch, "ray_cluster", lambda *pools: nullcontext())
    monkeypatch.setattr(Workers, "shared", lambda group: group)
    options = {
        "env": {"NCCL_DEBUG": "INFO"},
        "all_devices_visible": True,
        "gpus_per_process": 2,
        "placement_timeout_s": 40,
        "start_timeout_s": 900,
        "call_timeout_s": 50,
        "shutdown_timeout_s": 60,
    }
    with launch.worker_group(GrpoConfig.of({**plain, "pool": {"processes": [2], **options}})):
        assert told["pool"]["gpus_per_process"] == 2
        assert told["pool"]["placement_timeout_s"] == 40
        assert told["group"]["env"] == {"OMP_NUM_THREADS": "6", "NCCL_DEBUG": "INFO"}
        assert told["group"]["all_devices_visible"]
        assert (told["group"]["start_timeout_s"], told["group"]["timeout_s"]) == (900, 50)
    assert told["shutdown"] == {"timeout_s": 60}
    on_gpus = {**plain, "pool": {"processes": [2], **options, "use_gpu": True, "env": {"NCCL_ALGO": "Ring"}}}
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    with launch.worker_group(GrpoConfig.of(on_gpus)):
        assert told["group"]["env"].items() >= {
            ("NCCL_CUMEM_ENABLE", "0"),
            ("NCCL_NVLS_ENABLE", "0"),
            ("NCCL_ALGO", "Ring"),
        }


def test_the_drivers_settings_of_nccl_are_those_of_all_groups() -> None:
    assert launch.nccl_variables({"PATH": "/bin", "NCCL_DEBUG_FILE": "log", "NCCL_SOCKET_IFNAME": "eth1"}) == {
        "NCCL_CUMEM_ENABLE": "0"
    }
    driver = {"NCCL_CUMEM_ENABLE": "1", "NCCL_NVLS_ENABLE": "1"}
    assert launch.nccl_variables(driver) == driver
