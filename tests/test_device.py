"""Which accelerator a rank takes: the one that it was given, found by its id among those that it sees."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from core.device import HIDING, Accelerators, Vendor, choose_device, join_world, visible
from core.errors import Refused
from core.transport.ray import RayResourcePool
from core.transport.ray.actors import assigned
from core.transport.ray.environment import LEAVE_VISIBLE, checked_variables
from core.transport.ray.pool import cpus_beside
from core.worker import WorkerContext

UUIDS = "GPU-8932f937-d72c,GPU-1a2b3c4d-0000"
MIGS = "MIG-5c89ea5d-a1,MIG-9f4e2b11-b2,MIG-00000000-c3"


@pytest.mark.parametrize(
    ("vendor", "environment", "ids", "ordinals", "num_visible"),
    [
        ("nvidia", {}, ["6"], (6,), 8),  # nothing is hidden
        ("nvidia", {"CUDA_VISIBLE_DEVICES": "6"}, ["6"], (0,), 1),  # Ray has hidden the others
        ("nvidia", {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, ["6"], (2,), 4),  # all of the node's that Ray was given
        ("nvidia", {"CUDA_VISIBLE_DEVICES": " 4, 5,06"}, ["6"], (2,), 3),
        ("nvidia", {"CUDA_VISIBLE_DEVICES": "7,6,5,4"}, ["4", "7"], (0, 3), 4),  # its own order
        ("nvidia", {"CUDA_VISIBLE_DEVICES": UUIDS}, [UUIDS.split(",")[1]], (1,), 2),
        ("nvidia", {"CUDA_VISIBLE_DEVICES": MIGS}, MIGS.split(",")[:0:-1], (1, 2), 3),
        ("nvidia", {"CUDA_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": "7"}, ["2"], (1,), 2),
        ("amd", {"HIP_VISIBLE_DEVICES": "2,3"}, ["3"], (1,), 2),
        ("amd", {"HIP_VISIBLE_DEVICES": "2,3", "CUDA_VISIBLE_DEVICES": "3"}, ["3"], (1,), 2),  # HIP counts
        ("amd", {"HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": "4,5"}, ["5"], (1,), 2),
        ("amd", {"HIP_VISIBLE_DEVICES": "0,1", "ROCR_VISIBLE_DEVICES": "6,7"}, ["1"], (1,), 2),
        ("ascend", {"ASCEND_RT_VISIBLE_DEVICES": "8,9", "CUDA_VISIBLE_DEVICES": "0"}, ["9"], (1,), 2),
    ],
)
def test_what_a_rank_was_given_is_found_by_its_id_among_what_it_sees(
    vendor: Vendor, environment: dict[str, str], ids: list[str], ordinals: tuple[int, ...], num_visible: int
) -> None:
    found = Accelerators.given(ids, vendor, environment, num_devices=8)
    assert (found.ordinals, found.num_visible) == (ordinals, num_visible)
    assert sorted(found.ids) == sorted(ids)


@pytest.mark.parametrize(
    ("environment", "one"),
    [
        ({"CUDA_VISIBLE_DEVICES": "4,5"}, "0"),
        ({"CUDA_VISIBLE_DEVICES": UUIDS}, "1"),
        ({"CUDA_VISIBLE_DEVICES": "4,-1,5"}, "5"),
        ({"CUDA_VISIBLE_DEVICES": "4,4"}, "4"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "0"),
        ({}, "GPU-8932f937"),
    ],
)
def test_a_rank_that_does_not_see_what_it_was_given_is_refused(environment: dict[str, str], one: str) -> None:
    with pytest.raises(Refused, match=f"given accelerator '{one}' and doesn't see it") as refusal:
        Accelerators.given([one], "nvidia", environment, num_devices=8)
    assert "leave CUDA_VISIBLE_DEVICES to" in refusal.value.mend


@pytest.mark.parametrize(
    "value", ["4,5,6", "0", "", "-1", "0,-1,2", "3,3", UUIDS, MIGS, "NoDevFiles", pytest.param(None, id="unset")]
)
@pytest.mark.parametrize("hip", [None, "6.4"], ids=["cuda", "hip"])
def test_visible_devices_are_read_as_torch_reads_them(
    value: str | None, hip: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    for name in HIDING:
        monkeypatch.delenv(name, raising=False)
    if hip:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "9,8,7")
    if value is not None:
        monkeypatch.setenv("HIP_VISIBLE_DEVICES" if hip else "CUDA_VISIBLE_DEVICES", value)
    if hip and value == "":
        assert visible("amd", os.environ) == ("9", "8", "7")  # HIP takes it for unset, other than torch's parser
        return
    theirs = torch.cuda._parse_visible_devices()
    ours = visible("amd" if hip else "nvidia", os.environ)
    assert [str(each) for each in theirs] == ([str(each) for each in range(64)] if ours is None else list(ours))


def test_a_process_that_hides_all_sees_none_on_any_vendor() -> None:
    assert visible("nvidia", HIDING) == visible("amd", HIDING) == visible("ascend", HIDING) == ()


def test_ids_are_in_the_order_of_their_numbers_whatever_ray_calls_them() -> None:
    assert assigned({"GPU": ["10", "9"], "NPU": []}) == ("9", "10")
    assert assigned({"NPU": ["1"], "GPU": [], "TPU": ["0"]}) == ("1",)
    assert assigned({"GPU": []}) == assigned({}) == ()


# ---------------------------------------------------------------------------------------------- the environment


def test_local_rank_is_the_ordinal_of_the_device_and_ray_local_rank_the_place_on_the_node() -> None:
    place = WorkerContext("g", 13, 16, local_rank=5, local_world_size=8)
    on_cpu = place.environment()
    assert (on_cpu["LOCAL_RANK"], on_cpu["LOCAL_WORLD_SIZE"]) == ("5", "8")
    alone = WorkerContext("g", 13, 16, 5, 8, accelerators=Accelerators(("6",), (0,), 1)).environment()
    assert (alone["LOCAL_RANK"], alone["LOCAL_WORLD_SIZE"]) == ("0", "1")
    among_all = WorkerContext("g", 1, 4, 1, 4, accelerators=Accelerators(("5",), (5,), 8)).environment()
    assert (among_all["LOCAL_RANK"], among_all["LOCAL_WORLD_SIZE"]) == ("5", "8")
    for environment in (on_cpu, alone):
        assert (environment["RAY_LOCAL_RANK"], environment["RAY_LOCAL_WORLD_SIZE"]) == ("5", "8")


def test_nothing_of_ours_reads_local_rank_but_the_choice_of_a_device() -> None:
    root = Path(__file__).parents[1]
    files = [file for folder in ("core", "manymesh", "sdk", "plugins") for file in (root / folder).rglob("*.py")]
    told = re.compile(r'(environ(\.get)?|getenv)[\[(]"(RAY_)?LOCAL_RANK"')
    reading = {str(file.relative_to(root)) for file in files if told.search(file.read_text())}
    assert reading == {"core/device.py"}


@pytest.mark.parametrize(
    "name", ["LOCAL_RANK", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", *LEAVE_VISIBLE]
)
def test_variables_that_the_group_sets_are_refused_of_users(name: str) -> None:
    assert checked_variables({"NCCL_DEBUG": "INFO"}) == {"NCCL_DEBUG": "INFO"}
    with pytest.raises(Refused, match=f"sets {name}, which the group sets"):
        checked_variables({"NCCL_DEBUG": "INFO", name: "0"})


# ---------------------------------------------------------------------------------------------- the choice


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Answers as torch gives them where a process sees so many devices; the devices that were set."""
    made: list[int] = []

    def sees(count: int, local_rank: str | None = None) -> list[int]:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", made.append)
        monkeypatch.delenv("LOCAL_RANK", raising=False)
        if local_rank is not None:
            monkeypatch.setenv("LOCAL_RANK", local_rank)
        return made

    return sees


@pytest.mark.parametrize(
    ("count", "local_rank", "index"),
    [(8, "5", 5), (8, None, 0), (1, None, 0), (1, "3", 0)],  # the last: a launcher that shows each process its own
)
def test_a_rank_takes_the_device_of_local_rank_or_the_only_one(
    cuda: Any, count: int, local_rank: str | None, index: int
) -> None:
    made = cuda(count, local_rank)
    assert choose_device() == choose_device("cuda") == torch.device("cuda", index)
    assert made == [index, index]
    assert choose_device("cpu") == torch.device("cpu")


def test_a_rank_without_a_device_of_its_own_shares_no_other_ranks(cuda: Any) -> None:
    made = cuda(4, "5")
    with pytest.raises(Refused, match="no device for LOCAL_RANK 5") as refusal:
        choose_device()
    assert "4 visible devices" in str(refusal.value)
    assert made == []


def test_a_rank_that_sees_no_device_takes_the_cpu(cuda: Any) -> None:
    cuda(0, "5")
    assert choose_device() == torch.device("cpu")
    with pytest.raises(Refused, match="sees no CUDA device"):
        choose_device("cuda")


def test_a_world_is_not_bound_to_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """See join_world."""
    told: dict[str, Any] = {}
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **options: told.update(options))
    join_world(0, 2, object(), timeout_s=1)
    assert "device_id" not in told


# ---------------------------------------------------------------------------------------------- Ray

DRIVER = """
import json
import ray
from core.errors import Refused
from core.group import RayClassWithInitArgs
from core.transport.ray import RayResourcePool, RayWorkerGroup
from tests.support.workers import Echo

ray.init(num_cpus=2, num_gpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
told = {}


def group(name, pool, **options):
    ranks = list(range(pool.world_size))
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Echo, ranks, ranks), name=name, **options)
    told[name] = group.place()
    assert [sorted(each["ids"] or ()) for each in told[name]] == [list(each.gpu_ids) for each in group.identities]


try:
    RayResourcePool([1], gpus_per_process=5).placement_groups()
except Refused as error:
    told["refusal"] = str(error)
group("beside", RayResourcePool([1], name="beside"), all_devices_visible=True, env={"NCCL_DEBUG": "INFO"})
group("pair", RayResourcePool([1], gpus_per_process=2, name="pair"))
print("TOLD", json.dumps(told), flush=True)
"""


def test_ranks_on_ray_know_which_gpus_they_were_given_whatever_they_see() -> None:
    """Ray deals GPUs that it is told of and doesn't look for: the driver's CUDA_VISIBLE_DEVICES names four."""
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    environment |= {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER], capture_output=True, text=True, env=environment, timeout=150, check=False
    )
    line = next((line for line in done.stdout.splitlines() if line.startswith("TOLD")), None)
    assert line is not None, done.stderr
    told = json.loads(line.removeprefix("TOLD"))
    assert "5 GPU for each of 1 processes" in told.pop("refusal")
    beside, pair = told["beside"][0], told["pair"][0]
    ordinal = int(beside["ids"][0]) - 4
    assert (beside["CUDA_VISIBLE_DEVICES"], beside["ordinals"]) == ("4,5,6,7", [ordinal])
    assert (beside["LOCAL_RANK"], beside["LOCAL_WORLD_SIZE"]) == (str(ordinal), "4")
    assert (pair["CUDA_VISIBLE_DEVICES"].split(","), pair["ordinals"]) == (pair["ids"], [0, 1])
    assert (pair["LOCAL_RANK"], pair["LOCAL_WORLD_SIZE"]) == ("0", "2")
    assert len({*beside["ids"], *pair["ids"]}) == 3
    assert (beside["NCCL_DEBUG"], pair["NCCL_DEBUG"]) == ("INFO", None)


@pytest.mark.parametrize(
    ("num_gpus", "nodes", "cpus"),
    [
        (0, [{"CPU": 96, "GPU": 8}], 1),
        (1, [{"CPU": 192, "GPU": 8}, {"CPU": 4}], 8),  # at most 8
        (1, [{"CPU": 192, "GPU": 8}, {"CPU": 96, "GPU": 8}], 6),  # half of the smallest share
        (4, [{"CPU": 16, "GPU": 8}], 4),
        (0.5, [{"CPU": 32, "GPU": 4}], 2),
        (1, [{"CPU": 2, "GPU": 4}], 1),
    ],
)
def test_a_process_beside_gpus_gets_cpus_to_load_and_convert_a_model_with(
    num_gpus: float, nodes: list[dict[str, float]], cpus: float
) -> None:
    assert cpus_beside(num_gpus, nodes) == cpus


def test_groups_that_share_several_gpus_are_refused() -> None:
    with pytest.raises(Refused, match="whole GPUs, or a share of one"):
        RayResourcePool([1], gpus_per_process=2, max_colocate_count=2)
    with pytest.raises(Refused, match="whole GPUs, or a share of one"):
        RayResourcePool([1], gpus_per_process=0)
