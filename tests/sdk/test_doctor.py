"""The doctor on machines that are made up, and on this one."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
from rich.console import Console

from core.errors import RegistryError
from core.registry import EngineRegistry, Entry, Status
from sdk.__main__ import main
from sdk.doctor import checks, look, report
from sdk.doctor.checks import GIB, MIB, Finding, Torch
from tests.support.public_models import write_config

OK = Entry("toy", "engine", Status.OK, "acme-toy", "1.0", "acme_toy")
SAMPLER = attrs.evolve(OK, name="sampler", kind="rollout", distribution="acme-sampler")


def only(findings: list[Finding]) -> Finding:
    (finding,) = findings
    return finding


def worst(findings: list[Finding]) -> str:
    return max((finding.level for finding in findings), key=checks.LEVELS.index)


def not_ok(findings: list[Finding]) -> Finding:
    finding = only([finding for finding in findings if finding.level != "ok"])
    assert finding.mend
    return finding


def with_status(status: Status) -> Entry:
    return attrs.evolve(OK, status=status, reason="why", mend="how")


def test_a_python_that_a_plugin_does_not_take_is_a_problem() -> None:
    assert only(checks.python_versions("3.12.1", {"manymesh": ">=3.11", "acme-toy": ""})).level == "ok"
    findings = not_ok(checks.python_versions("3.12.1", {"manymesh": ">=3.11", "acme-toy": "<3.12"}))
    assert (findings.level, findings.detail) == ("problem", "3.12.1, but acme-toy wants <3.12")


@pytest.mark.parametrize(
    ("status", "level", "if_asked_for"),
    [
        (Status.OK, "ok", "ok"),
        (Status.DISABLED, "ok", "problem"),
        (Status.MISSING_DEPENDENCY, "warning", "problem"),
        (Status.BROKEN, "problem", "problem"),
        (Status.INCOMPATIBLE, "problem", "problem"),
        (Status.SHADOWED, "problem", "problem"),
    ],
)
def test_a_plugin_that_cannot_be_used_counts_by_its_status_and_whether_it_was_asked_for(
    status: Status, level: str, if_asked_for: str
) -> None:
    entry = with_status(status)
    for names, want in (((), level), (("toy",), if_asked_for)):
        findings = checks.plugins([entry, OK, SAMPLER], names)[0]
        assert findings.level == want
        assert (findings.mend == "how") is (want != "ok")
        assert ("why" in findings.detail) is (status is not Status.OK)


def test_a_machine_without_a_usable_engine_or_rollout_is_warned_of() -> None:
    assert worst(checks.plugins([OK, SAMPLER])) == "ok"
    assert not_ok(checks.plugins([OK])).detail == "no rollout can be used"
    assert [finding.check for finding in checks.plugins([])] == ["engine", "rollout"]


def test_pins_that_cannot_agree_are_a_problem_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = {"acme-toy": ["torch==2.4", "attrs>=99"], "acme-sampler": ["torch>=2.6"]}
    monkeypatch.setattr("importlib.metadata.requires", needs.__getitem__)
    findings = checks.agreement([OK, SAMPLER], {"torch": "2.7.0", "attrs": "26.1"})
    assert [finding.level for finding in findings] == ["problem", "problem"]
    assert findings[0].detail.startswith("acme-toy and acme-sampler cannot share an environment")
    assert findings[0].detail.endswith("acme-toy needs torch==2.4, acme-sampler needs torch>=2.6")
    assert "environment of its own" in findings[0].mend
    assert findings[1].detail == "acme-toy needs attrs>=99, installed is 26.1"
    assert findings[1].mend == "pip install 'attrs>=99', or another acme-toy"
    assert only(checks.agreement([SAMPLER], {"torch": "2.7.0"})).level == "ok"


CPU = Torch("2.9.0+cpu", None)
CUDA = Torch("2.9.0", "12.8", (("H", 70 * GIB, 80 * GIB),), nccl=True)


@pytest.mark.parametrize(
    ("torch", "gpus", "level", "message"),
    [
        (CPU, 0, "ok", ""),
        (CUDA, 1, "ok", ""),
        (CPU, 2, "problem", "the machine has 2 NVIDIA GPUs, and torch 2.9.0+cpu is a build for CPU"),
        (attrs.evolve(CUDA, devices=()), 2, "problem", "sees no device"),
        (attrs.evolve(CUDA, devices=()), 0, "warning", "sees no device"),
        (attrs.evolve(CUDA, nccl=False), 1, "problem", "no NCCL"),
        (attrs.evolve(CUDA, devices=(("H", 10 * GIB, 80 * GIB),)), 1, "warning", "10.0 of 80.0 GiB free"),
        (Torch("", None, error="ImportError: libcudart.so.12"), 1, "problem", "ImportError: libcudart.so.12"),
    ],
)
def test_torch_has_to_see_what_the_machine_has(torch: Torch, gpus: int, level: str, message: str) -> None:
    findings = checks.torch_and_devices(torch, gpus)
    assert worst(findings) == level
    if message:
        assert message in not_ok(findings).detail


def test_every_gpu_is_listed() -> None:
    two = attrs.evolve(CUDA, devices=CUDA.devices * 2)
    assert [finding.check for finding in checks.torch_and_devices(two, 2)] == ["torch", "GPU 0", "GPU 1"]


@pytest.mark.parametrize(
    ("vendor", "seen", "environment", "level", "said"),
    [
        ("nvidia", 0, {}, None, ""),
        ("nvidia", 8, {}, "ok", "all: a process can have 8 (gpus_per_process of its pool)"),
        ("nvidia", 2, {"CUDA_VISIBLE_DEVICES": "4,5"}, "ok", "CUDA_VISIBLE_DEVICES=4,5: a process can have 2"),
        ("nvidia", 2, {"CUDA_VISIBLE_DEVICES": "4,5", "HIP_VISIBLE_DEVICES": "1"}, "ok", "can have 2"),
        ("nvidia", 1, {"CUDA_VISIBLE_DEVICES": "4,5"}, "problem", "names 2 devices, and torch sees 1"),
        ("amd", 1, {"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "0"}, "ok", "can have 1"),
        ("amd", 1, {"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}, "warning", "HIP_VISIBLE_DEVICES=0, CUDA"),
    ],
)
def test_variables_that_show_some_of_the_gpus_are_told_with_how_many_a_process_can_have(
    vendor: Any, seen: int, environment: dict[str, str], level: str | None, said: str
) -> None:
    torch = attrs.evolve(CUDA, devices=CUDA.devices[:1] * seen, vendor=vendor)
    found = checks.visible_devices(torch, environment)
    assert [finding.level for finding in found] == ([level] if level else [])
    for finding in found:
        assert said in finding.detail
        assert bool(finding.mend) is (finding.level != "ok")


@pytest.mark.parametrize(
    ("total", "free", "level"),
    [
        (None, None, "ok"),
        (32 * GIB, 30 * GIB, "ok"),
        (64 * MIB, 64 * MIB, "problem"),
        (32 * GIB, 10 * MIB, "problem"),
        (8 * GIB, 8 * GIB, "warning"),
    ],
)
def test_shared_memory_has_to_hold_rays_objects_and_the_ranks_buffers(
    total: int | None, free: int | None, level: str
) -> None:
    findings = only(checks.shared_memory(total, free, memory=64 * GIB))
    assert findings.level == level
    assert bool(findings.mend) is (level != "ok")


def test_a_full_disk_few_files_and_a_host_without_address_are_found() -> None:
    assert only(checks.disk("/tmp", 100 * GIB, 20 * GIB)).level == "ok"
    assert not_ok(checks.disk("/tmp", 100 * GIB, 2 * GIB)).level == "problem"
    assert only(checks.open_files(-1)).level == only(checks.open_files(65536)).level == "ok"
    assert not_ok(checks.open_files(1024)).level == "warning"
    assert only(checks.host_name("node", "10.0.0.7")).level == "ok"
    assert "/etc/hosts" in not_ok(checks.host_name("node", None)).mend


def test_ray_has_to_be_there_in_a_version_that_we_take_and_to_answer() -> None:
    assert only(checks.ray("2.60.0", ">=2.50,<3", None)).detail == "2.60.0, this machine alone"
    assert only(checks.ray("2.60.0", ">=2.50,<3", "head:6379")).detail == "2.60.0, cluster at head:6379"
    assert not_ok(checks.ray("2.40.0", ">=2.50,<3", None)).mend == "pip install 'ray>=2.50,<3'"
    assert "not installed" in not_ok(checks.ray(None, ">=2.50,<3", None)).detail
    assert not_ok(checks.ray("2.60.0", ">=2.50,<3", "head:6379", "nobody answers")).detail == "nobody answers"


def test_a_hidden_package_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(checks.packages_are_ours({})).level == "ok"
    hidden = {"sdk": RegistryError("/home/me/sdk is imported", mend="rename it")}
    monkeypatch.setattr(look, "hidden_packages", lambda: hidden)
    findings = not_ok([finding for finding in look.look() if finding.check in ("packages", "sdk")])
    assert (findings.detail, findings.mend) == ("/home/me/sdk is imported", "rename it")


def test_what_auto_is_on_this_machines_device_is_said() -> None:
    options = {"engine fsdp": {"dtype": "float32", "compute_dtype": "bfloat16"}, "rollout x": {}}
    detail = only(checks.settled(options, "cuda")).detail
    assert detail == "auto on cuda: engine fsdp dtype=float32 compute_dtype=bfloat16; float32 products without TF32"
    assert only(checks.settled(options, "cuda", "high")).detail.endswith("with TF32")
    assert "TF32" not in only(checks.settled(options, "cpu")).detail
    assert checks.settled({"rollout x": {}}, "cuda") == []


def test_memory_that_does_not_fit_a_device_is_a_problem_with_a_way_out() -> None:
    def finding(device_bytes: int | None) -> Finding:
        return checks.device_memory("update", "70.0 GiB", 70 * GIB, "activations", device_bytes, 3 * GIB)

    assert finding(None).level == finding(80 * GIB).level == "ok"
    assert finding(72 * GIB).level == "problem"
    assert "max_tokens" in finding(72 * GIB).mend


def test_a_runs_config_is_looked_at_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(Path(__file__).parents[2] / "examples/gpu/8b_8gpus.yaml")
    model = write_config("Llama-3.1-8B", tmp_path / "model")

    def findings(*args: str) -> dict[str, Any]:
        status = main(["doctor", "--run", file, "--set", f"model.path={model}", "--json", *args])
        answer: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert status == (0 if answer["healthy"] else 1)
        return {finding["check"]: finding for finding in answer["findings"]}

    roomy, tight = findings("--gpu-memory", "80"), findings("--gpu-memory", "40")
    assert "actor dtype=float32 compute_dtype=bfloat16, rollout dtype=bfloat16" in roomy["dtype"]["detail"]
    assert {finding["level"] for check, finding in roomy.items() if check != "rollout vllm"} == {"ok"}
    assert roomy["rollout vllm"]["level"] in ("ok", "warning")  # the run may be for another machine
    assert roomy.keys() >= {"memory: generate", "memory: update", "memory: weights"}
    assert tight["memory: update"]["level"] == "problem"
    assert "gradients" in tight["memory: update"]["mend"]
    refused = findings("--set", "actor.engine.dtype=bfloat16", "--gpu-memory", "80")["run"]
    assert refused["mend"] == "set dtype='float32', compute_dtype='bfloat16'"


# --- this machine --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def here() -> list[Finding]:
    return list(look.look())


def test_this_machine_is_looked_over_whole(here: list[Finding]) -> None:
    names = {finding.check for finding in here}
    assert {"python", "packages", "engine fsdp", "pins", "torch", "ray", "shared memory", "disk", "host name"} <= names
    assert all(bool(finding.mend) is (finding.level != "ok") for finding in here)


def test_a_check_that_fails_itself_is_a_finding_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(path: str) -> Any:
        raise PermissionError(path)

    monkeypatch.setattr("shutil.disk_usage", gone)
    findings = {finding.check: finding for finding in look.look()}
    assert findings["disk"].level == "problem"
    assert "PermissionError" in findings["disk"].detail
    assert findings["host name"].level == "ok"


def test_only_the_plugins_that_were_asked_for_are_looked_at() -> None:
    registry = EngineRegistry.default()
    assert look.entries_of(registry, []) == list(registry.entries)
    assert {entry.name for entry in look.entries_of(registry, ["fsdp", "Manymesh_HF:hf"])} == {"fsdp", "hf"}
    assert len(look.entries_of(registry, ["manymesh-fsdp", "fsdp"])) == 1
    with pytest.raises(RegistryError, match="no plugin 'fsdq' is installed"):
        look.entries_of(registry, ["fsdq"])


def test_the_command_exits_1_on_a_problem_and_0_on_warnings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for level, status in (("ok", 0), ("warning", 0), ("problem", 1)):
        finding = Finding("disk", level, "[red]", "free space" if level != "ok" else "")  # type: ignore[arg-type]
        monkeypatch.setattr(look, "look", lambda names, finding=finding: iter([finding]))
        assert main(["doctor"]) == status
        message = capsys.readouterr().out
        assert "disk: [red]" in message
        assert ("mend: free space" in message) is (level != "ok")
        assert main(["doctor", "--json"]) == status
        answer = json.loads(capsys.readouterr().out)
        assert answer == {"schema": 1, "healthy": status == 0, "findings": [attrs.asdict(finding)]}


def test_a_name_that_is_not_installed_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "fsdq"]) == 2
    assert "no plugin 'fsdq' is installed" in capsys.readouterr().err


def test_the_summary_counts() -> None:
    console = Console(file=(out := io.StringIO()))
    report.show(
        [Finding("a", "problem", "x", "y"), Finding("b", "warning", "x", "y"), Finding("c", "ok", "x")], console
    )
    assert out.getvalue().splitlines()[-1] == "1 problem, 1 warning"
    assert report.healthy(report.show([Finding("c", "ok", "x")], console))
    assert out.getvalue().splitlines()[-1] == "all is well"


# --- check ---------------------------------------------------------------------------------------------------------


def checked(*args: str) -> tuple[int, dict[str, Any]]:
    """In a process of its own: pytest within pytest would share the outer one's state."""
    process = subprocess.run([sys.executable, "-m", "sdk", "check", *args, "--json"], capture_output=True, text=True)
    assert process.returncode in (0, 1), process.stderr
    answer: dict[str, Any] = json.loads(process.stdout)
    return process.returncode, answer


def test_a_sound_plugin_is_checked_without_a_word_of_pytest() -> None:
    status, answer = checked("fsdp")
    assert (status, answer["healthy"]) == (0, True)
    message = {finding["check"]: finding["level"] for finding in answer["findings"]}
    assert message["engine fsdp: the planner refuses a world of no ranks"] == "ok"
    assert len(message) >= 8


@pytest.mark.ci
def test_a_plugin_that_says_what_is_not_true_is_told_what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.fake_distributions import BACKEND, install, manifest, plugin

    install(
        tmp_path,
        "acme-toy",
        {"acme_toy.py": "import torch\n" + plugin(manifest("toy", "acme_toy")), "acme_toy_backend.py": BACKEND},
    )
    install(tmp_path, "broken-toy", {"broken_toy.py": "1/0"})
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    status, answer = checked("toy")
    assert status == 1
    wrong = {finding["check"]: finding["detail"] for finding in answer["findings"] if finding["level"] == "problem"}
    assert "torch" in wrong["engine toy: listing and planning import nothing heavy"]
    assert "engine toy: its options have types and defaults" in wrong
    status, answer = checked("broken-toy")
    assert status == 1
    assert answer["findings"][0]["detail"] == "is broken: ZeroDivisionError: division by zero"


def test_a_name_that_nothing_has_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "fsdq"]) == 2
    assert "did you mean 'fsdp'?" in capsys.readouterr().err
