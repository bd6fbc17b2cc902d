"""Groups over several nodes: two raylets with stores of their own, as Ray's own tests make them on one machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from typing import Any

import pytest

pytestmark = pytest.mark.slow

DRIVER = """
import json, os, time
import ray, torch
from ray.cluster_utils import Cluster
from tensordict import TensorDict
from core.batch import jagged_from
from core.errors import Refused, WorkerFailed
from core.group import RayClassWithInitArgs
from core.transport.ray import RayResourcePool, RayWorkerGroup
from tests.support.workers import Echo

MB = 1 << 20
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "object_store_memory": 200 * MB})
second = cluster.add_node(num_cpus=3, object_store_memory=200 * MB)
ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
cluster.wait_for_nodes()
facts = {}


def group(processes, ranks, name):
    pool = RayResourcePool(processes, name=name)
    collected = [ranks.index(dp) for dp in sorted(set(ranks))]
    return RayWorkerGroup(pool, RayClassWithInitArgs(Echo, ranks, collected), name=name)


try:
    RayResourcePool([4, 2]).placement_groups()
except Refused as error:
    facts["refusal"] = str(error)
both = group([2, 2], [0, 1, 1, 0], "both")
facts["nodes"] = [identity.node_id for identity in both.identities]
facts["lost"] = [rank for rank, node in enumerate(facts["nodes"]) if node == second.node_id]
lengths = torch.arange(8) % 3 + 1
batch = TensorDict({"x": torch.arange(8), "t": jagged_from(torch.arange(int(lengths.sum())), lengths)}, batch_size=[8])
facts["echo"] = both.echo(batch)["x"].tolist()
facts["places"] = both.place()

# Rows go from the workers of one node to those of the other: 2 MB a row, so each of them lies in a store.
away = group([1], [0], "away")
facts["away"] = away.identities[0].node_id
future = both.make_later(batch, width=MB // 2)
handed = away.echo(future[0])
facts["handed"], facts["wide"] = handed["x"].tolist(), list(handed["wide"].shape)
away.shutdown()

began = time.monotonic()
call = both.sleep(600)
cluster.remove_node(second, allow_graceful=False)
try:
    call.result()
except WorkerFailed as error:
    facts["failed"] = [error.rank, str(error), time.monotonic() - began]
facts["after"] = both.failed
print("TOLD", json.dumps(facts), flush=True)
both.shutdown()
ray.shutdown()
cluster.shutdown()
"""


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    """What a driver on two nodes has seen."""
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    # A place of its own, and a short one for its sockets: a cluster in the common one is what any ray.init() joins.
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as place:
        process = subprocess.run(
            [sys.executable, "-c", DRIVER],
            capture_output=True,
            text=True,
            env={**environment, "RAY_TMPDIR": place},
            timeout=300,
        )
    lines = [line for line in process.stdout.splitlines() if line.startswith("TOLD ")]
    assert lines, process.stderr[-4000:]
    facts: dict[str, Any] = json.loads(lines[0].removeprefix("TOLD "))
    return facts


def test_ranks_of_a_node_follow_each_other_and_know_their_place_on_it(facts: dict[str, Any]) -> None:
    nodes = facts["nodes"]
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
    assert nodes == sorted(nodes)
    assert [place["LOCAL_RANK"] for place in facts["places"]] == ["0", "1", "0", "1"]
    assert {place["RAY_LOCAL_WORLD_SIZE"] for place in facts["places"]} == {"2"}


def test_rows_come_back_in_order_whatever_node_had_them(facts: dict[str, Any]) -> None:
    assert facts["echo"] == list(range(8))


def test_rows_go_from_the_workers_of_one_node_to_those_of_another(facts: dict[str, Any]) -> None:
    assert facts["away"] in facts["nodes"]
    assert facts["handed"] == list(range(8))
    assert facts["wide"] == [8, (1 << 20) // 2]


def test_a_pool_for_which_no_node_has_room_is_refused_though_all_together_have(facts: dict[str, Any]) -> None:
    assert "no node has room for 4 of its processes" in facts["refusal"]


def test_a_node_that_dies_fails_the_call_with_a_rank_that_was_on_it(facts: dict[str, Any]) -> None:
    rank, text, seconds = facts["failed"]
    assert rank in facts["lost"]
    assert "group 'both'" in text
    assert facts["after"]
    assert seconds < 60
