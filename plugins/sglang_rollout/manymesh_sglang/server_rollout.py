"""Rollout with an SGLang server, which answers requests while others come, end and are updated."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDict

from core.errors import ManymeshError, Refused
from core.manifest import ModelFacts
from core.rollout import SamplingParams
from manymesh.parts.checkpoint_weights import read_checkpoint
from manymesh.parts.requests import is_certain
from manymesh.parts.rollout_checks import cannot_run, check_sleep_mode, not_initialized
from manymesh.parts.rollout_rows import token_lists
from manymesh.parts.server_engine import ServerEngine
from manymesh.parts.server_rollout import ReleasingServerRollout
from manymesh.parts.world_mesh import world_mesh, world_size
from manymesh_sglang.arguments import arguments, environment
from manymesh_sglang.config import SPARE, SglangServerConfig
from manymesh_sglang.http import HttpClient
from manymesh_sglang.plan import server_plan
from manymesh_sglang.requests import Asking
from manymesh_sglang.server_engine import RowRequest, SglangServerEngine
from manymesh_sglang.server_process import LOOPBACK, ServerProcess
from manymesh_sglang.weight_upload import DiskUpload, DistributedUpload, TensorUpload, WeightUpload


class SglangServerRollout(ReleasingServerRollout):
    """`core.rollout.RolloutServer` over SGLang: each rank has a replica, a server that ends with its own process, or
    one of `config.addresses`, which is neither started nor ended. Releases memory on CUDA with sleep_mode.

    Args:
        config: options; `config.model` is the directory to load.
        device: "cpu", "cuda" or None for what the machine has.

    Raises:
        Refused: there are not as many addresses as ranks.
    """

    _config: SglangServerConfig

    def __init__(self, config: SglangServerConfig, device: str | None = None) -> None:
        super().__init__(config, device, world_mesh(server_plan(config, world_size(), None)))
        self._asking: Asking | None = None

    def _start(self) -> tuple[ServerEngine, dict[str, torch.Tensor]]:
        facts, expected = read_checkpoint(self._config.model, self._config.load)
        asking = Asking.of(self._config, facts)
        process = None if self._config.addresses else self._process(facts, asking)
        client = self._client(process)
        engine = SglangServerEngine(client, process, self._upload(client, process), self._config.update_timeout_s)
        try:
            info = engine.call(engine.ready(self._config.start_timeout_s))
            self._asking = self._fit(asking, info, client)
        except BaseException as error:
            explanation = process.explain() if process is not None else ""
            engine.shutdown()
            if explanation and isinstance(error, ManymeshError):
                raise cannot_run("SGLang", facts, explanation) from error
            raise
        return engine, expected

    def _process(self, facts: ModelFacts, asking: Asking) -> ServerProcess:
        options = arguments(self._config, facts, self._device, has_tokenizer=asking.check.has_tokenizer)
        return ServerProcess(options, environment(self._device, self._config.tensor_parallel), self._config.port)

    def _client(self, process: ServerProcess | None) -> HttpClient:
        if process is not None:
            return HttpClient(LOOPBACK, process.port, process.key, process.explain)
        host, _, port = self._config.addresses[self._mesh.rank].rpartition(":")
        return HttpClient(host, int(port), self._config.api_key)

    def _upload(self, client: HttpClient, process: ServerProcess | None) -> WeightUpload:
        config = self._config
        upload = config.upload(self._device.type)
        if upload == "disk":
            return DiskUpload(client, config.update_timeout_s, config.weights_dir)
        if upload == "tensor":
            return TensorUpload(client, config.update_timeout_s, config.tensor_parallel)
        # A server of our own has this rank's device too, of which nccl would have one process alone.
        on_gpu = process is None and self._device.type == "cuda"
        return DistributedUpload(
            client,
            config.update_timeout_s,
            num_receivers=config.tensor_parallel,
            host=config.host if process is None else LOOPBACK,
            backend="nccl" if on_gpu else "gloo",
            device=self._device if on_gpu else torch.device("cpu"),
        )

    def _fit(self, asking: Asking, info: dict[str, object], client: HttpClient) -> Asking:
        """What the server can hold. Raises Refused where it was started for another use than ours."""
        if info.get("incremental_streaming_output") is not True:
            raise Refused(
                "the server's streams say all tokens again and again",
                where=client.address,
                mend="start it with --incremental-streaming-output",
            )
        if self._config.addresses:
            tp, size = self._config.tensor_parallel, int(str(info.get("tp_size", 1)))
            if size != tp:
                raise Refused(
                    "the server is cut over another number of processes",
                    have=f"its tp_size {size}, tensor_parallel {tp}",
                    where=client.address,
                    mend=f"set tensor_parallel to {size}",
                )
            context = info.get("context_length") or asking.context + SPARE
            asking = asking.within(int(str(context)) - SPARE)
        return asking.within(int(str(info["max_total_num_tokens"])) - SPARE)

    def _requests(
        self, prompts: TensorDict, sampling: SamplingParams, sample: torch.Tensor, request_ids: Sequence[str]
    ) -> list[RowRequest]:
        if self._asking is None:
            raise not_initialized()
        parameters = self._asking.parameters(prompts, sampling, sample)
        certain = is_certain(sampling)
        rows = token_lists(prompts["prompt_ids"])
        return [
            RowRequest(request_id, tuple(row), each, certain)
            for request_id, row, each in zip(request_ids, rows, parameters, strict=True)
        ]

    def _score_limits(self) -> tuple[int, int]:
        if self._asking is None:
            raise not_initialized()
        return self._asking.vocab_size, self._asking.context

    def _check_can_release(self) -> None:
        check_sleep_mode("SGLang", self._device.type, sleep_mode=self._config.sleep_mode)
