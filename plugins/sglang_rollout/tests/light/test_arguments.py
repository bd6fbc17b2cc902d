"""What SGLang's processes are told: their devices, their cores, their seeds. Without SGLang."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from core.errors import Refused
from manymesh_sglang.arguments import BINDING, check_devices, environment, shares_of_cores
from manymesh_sglang.config import SglangServerConfig
from manymesh_sglang.sampler_protocol import KIND
from manymesh_sglang.scheduler import _prepare_min_new_tokens, _stream


@pytest.mark.parametrize(
    ("cores", "num_processes", "shares"),
    [
        ([0, 1, 2, 3], 2, ["0,1", "2,3"]),
        ([4, 5, 6], 2, ["4", "5"]),
        ([7, 9], 4, ["7", "9", "7", "9"]),
        ([3], 2, ["3", "3"]),
    ],
)
def test_each_process_has_cores_of_its_own_where_there_are_enough(
    cores: list[int], num_processes: int, shares: list[str]
) -> None:
    assert shares_of_cores(cores, num_processes) == shares


def test_cores_are_named_only_for_several_processes_on_cpu_and_what_the_user_set_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(BINDING, raising=False)
    assert BINDING not in environment(torch.device("cpu"))
    assert BINDING not in environment(torch.device("cuda", 0), 2)
    assert len(environment(torch.device("cpu"), 2)[BINDING].split("|")) == 2
    monkeypatch.setitem(os.environ, BINDING, "0|1")
    assert BINDING not in environment(torch.device("cpu"), 2)


def test_a_rank_that_sees_too_few_gpus_behind_its_first_is_refused() -> None:
    check_devices(4, 0, 4)
    check_devices(2, 2, 4)
    with pytest.raises(Refused, match=r"1 GPUs[\s\S]*tensor_parallel 2[\s\S]*gpus_per_process"):
        check_devices(2, 0, 1)
    with pytest.raises(Refused, match="number 3"):
        check_devices(2, 3, 4)


@pytest.mark.parametrize(
    ("weights", "device", "addresses", "upload"),
    [
        (None, "cuda", (), "tensor"),
        (None, "cuda", ("a:1",), "distributed"),
        (None, "cpu", (), "distributed"),
        ("distributed", "cuda", (), "distributed"),
    ],
)
def test_weights_stay_on_the_gpu_where_a_server_of_our_own_shares_it(
    weights: str | None, device: str, addresses: tuple[str, ...], upload: str
) -> None:
    assert SglangServerConfig("x", weights=weights, addresses=addresses).upload(device) == upload


def test_processes_that_hold_a_model_together_agree_on_seeds_that_nobody_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    def request(request_id: str) -> SimpleNamespace:
        return SimpleNamespace(rid=request_id, sampling_params=SimpleNamespace(sampling_seed=None, custom_params=None))

    def in_a_process_of_its_own() -> list[int]:
        monkeypatch.setattr("manymesh_sglang.scheduler._numbers", iter(range(10)))
        return [_stream(request(each)) for each in ("a", "b", "a")]

    first, second = in_a_process_of_its_own(), in_a_process_of_its_own()
    assert first == second
    assert len(set(first)) == 3


def test_min_new_tokens_masks_the_stops_of_each_row_and_sends_only_their_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[int] = []
    move: Any = torch.Tensor.to

    def counted(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(self.numel())
        return move(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", counted)

    def request(stops: list[int], num_sampled: int) -> SimpleNamespace:
        params = SimpleNamespace(stop_token_ids=stops, min_new_tokens=3, custom_params={KIND: "raw"})
        return SimpleNamespace(sampling_params=params, output_ids=[0] * num_sampled)

    reqs = [request([1, 4], 0), request([], 2), request([5000], 1)]
    orchestrator = SimpleNamespace(reqs=lambda: reqs, vocab_size=1000, device="cpu")
    penalizer = SimpleNamespace(orchestrator=orchestrator)
    _prepare_min_new_tokens(penalizer)
    masked = penalizer.stop_token_penalties.isinf().nonzero().tolist()
    assert masked == [[0, 1], [0, 4]]  # 5000 is no token of the model
    assert penalizer.len_output_tokens.tolist() == [[0], [2], [1]]
    assert sum(sent) < 10
