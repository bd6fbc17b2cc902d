"""What runs inside vLLM's engine process: weight updates, log-probabilities by row, and an end with its owner's.

vLLM imports this module there before it loads the model: it is its `worker_extension_cls`.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from contextlib import suppress
from typing import Any

import torch
from safetensors.torch import load
from vllm.v1.sample.sampler import Sampler

from core.rollout import LogProbKind
from manymesh_vllm.weights import Reload

KIND = "manymesh_log_probs"  # in vLLM's extra_args of a request
OWNER = "MANYMESH_VLLM_OWNER"  # environment variable: the process to end with
_GREEDY = 1e-5  # vLLM takes lower temperatures for 0


class ServerExtension:
    """Mixed into vLLM's worker; called by collective_rpc. Arguments are plain, so that no pickle is needed."""

    model_runner: Any
    _reload: Reload | None = None

    def manymesh_sample_by_row(self) -> None:
        """Give each request log-probabilities of its own kind."""
        self.model_runner.sampler = RowKinds(self.model_runner)

    def manymesh_score_at(self, temperature: float) -> None:
        """From now on, log-probabilities of prompts are of logits / temperature."""
        self.model_runner.sampler.prompt_temperature = temperature

    def manymesh_begin(self) -> None:
        self._reload = Reload(self)

    def manymesh_load(self, data: bytes) -> None:
        assert self._reload is not None
        self._reload.load(list(load(data).items()))

    def manymesh_finish(self) -> None:
        assert self._reload is not None
        self._reload.finish()
        self._reload = None

    def manymesh_abort(self) -> None:
        reload, self._reload = self._reload, None
        if reload is not None:
            reload.abort()


class RowKinds(Sampler):
    """vLLM's sampler, with the sampled token's log-probability of the kind that its request asks for.

    vLLM has one kind for an engine, and none that is tempered but not truncated.

    Attributes:
        prompt_temperature: of the log-probabilities of prompts.
    """

    prompt_temperature: float = 1.0

    def __init__(self, model_runner: Any) -> None:
        before = model_runner.sampler
        super().__init__("raw_logprobs", before.use_fp64_gumbel)
        self._runner = [model_runner]  # in a list: it is no part of this module
        self._processed = Sampler("processed_logprobs", before.use_fp64_gumbel)

    def forward(self, logits: torch.Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        kinds = self._kinds()
        if len(kinds) != len(logits) or sampling_metadata.max_num_logprobs is None:  # vLLM's own rehearsals
            return super().forward(logits, sampling_metadata, *args, **kwargs)
        tempered = torch.tensor([kind == LogProbKind.TEMPERATURE for kind in kinds], device=logits.device)
        processed = torch.tensor([kind == LogProbKind.PROCESSED for kind in kinds], device=logits.device)
        values = logits.to(torch.float32, copy=True)  # the sampler writes to what it is given
        if sampling_metadata.temperature is not None:
            temperature = sampling_metadata.temperature[: len(kinds)]
            values.div_(torch.where(tempered & (temperature > _GREEDY), temperature, 1.0).unsqueeze(1))
        sampler = self._processed.forward if LogProbKind.PROCESSED in kinds else super().forward
        out = sampler(logits, sampling_metadata, *args, **kwargs)
        token_log_probs = values.log_softmax(-1).gather(1, out.sampled_token_ids.long())[:, 0]
        theirs = out.logprobs_tensors.logprobs
        theirs[:, 0] = torch.where(processed, theirs[:, 0], token_log_probs)
        return out

    def compute_logprobs(self, logits: torch.Tensor) -> torch.Tensor:
        """Called for prompts; what `forward` computes with it, it replaces."""
        values: torch.Tensor = super().compute_logprobs(logits.float() / self.prompt_temperature)
        return values

    def _kinds(self) -> list[str]:
        [runner] = self._runner
        extra_args = (runner.requests[name].sampling_params.extra_args or {} for name in runner.input_batch.req_ids)
        return [each.get(KIND, LogProbKind.RAW) for each in extra_args]


def _end_with_owner() -> None:
    """A worker that is killed takes no leave of its engine, which would hold its memory for ever.

    vLLM's own workers, which import this, are in the engine's process or children of it. The engine watches nobody.
    """
    owner, engine = int(os.environ.get(OWNER, "0")), os.getppid()
    if not owner:
        return

    def end() -> None:
        for pid in {engine, os.getpid()} - {owner, 1}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    try:
        descriptor = os.pidfd_open(owner)
    except ProcessLookupError:
        end()
        return

    def watch() -> None:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)  # readable when the process has ended
        poller.poll()
        end()

    threading.Thread(target=watch, name="end with owner", daemon=True).start()


_end_with_owner()
