"""What changes in SGLang's scheduler where its environment has MANYMESH_SGLANG_SAMPLER=1, and nowhere else.

SGLang finds `register` by its entry point in every process.
"""

from __future__ import annotations

import hashlib
import os
from itertools import count
from typing import Any

from manymesh_sglang.sampler_protocol import KIND, KINDS, SCORE, SEED_BITS, SWITCH


def register() -> None:
    """Have our sampler built in the place of each of SGLang's; it changes the scheduler around it as it is built.

    Not as a sampling backend of its own name, which SGLang doesn't let a server on CPU choose.
    """
    if os.environ.get(SWITCH) != "1":
        return
    from sglang.srt.arg_groups.choices import BUILT_IN_SAMPLING_BACKENDS
    from sglang.srt.layers.sampler import register_sampler_backend

    for backend in BUILT_IN_SAMPLING_BACKENDS:
        register_sampler_backend(backend, build)


def build() -> Any:
    """The sampler, in a scheduler that gives it what it needs."""
    from manymesh_sglang.sampler import RowSampler

    change_scheduler()
    return RowSampler()


def change_scheduler() -> None:
    """Patch the classes once. What isn't where it is looked for raises here, before any request runs."""
    from sglang.srt.layers.logits_processor import LogitsMetadata
    from sglang.srt.layers.logprob_processor import InputLogprobProcessor
    from sglang.srt.managers.schedule_batch import FINISH_MATCHED_TOKEN, Req
    from sglang.srt.sampling.penaltylib import BatchedMinNewTokensPenalizer, BatchedRepetitionPenalizer
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    def of_token(self: Any, new_tokens: list[int]) -> bool:
        """Ours end at their stop tokens and at no other, which with SGLang's ignore_eos would be none at all."""
        if _kind(self) is None:
            return bool(token_finish(self, new_tokens))
        ends = self.sampling_params.stop_token_ids or ()
        for number, token in enumerate(new_tokens):
            if token in ends:
                self.finished_reason = FINISH_MATCHED_TOKEN(matched=token)
                self.finished_len = len(self.output_ids) - len(new_tokens) + number + 1
                return True
        return False

    def of_string(self: Any, *args: Any, **kwargs: Any) -> bool:
        """No stop string before min_new_tokens."""
        if _kind(self) is not None and len(self.output_ids) < self.sampling_params.min_new_tokens:
            return False
        return bool(string_finish(self, *args, **kwargs))

    def with_streams(cls: Any, batch: Any, vocab_size: int) -> Any:
        import torch

        info = from_batch(cls, batch, vocab_size)
        info.sampling_seed = torch.tensor([_stream(req) for req in batch.reqs], dtype=torch.int64).to(batch.device)
        return info

    def keep_untouched(self: Any, logits: Any) -> None:
        """Penalties write to the logits; of these RAW and TEMPERATURE are told."""
        orchestrator = self.penalizer_orchestrator
        if (
            self.acc_additive_penalties is not None
            or self.acc_scaling_penalties is not None
            or (orchestrator is not None and orchestrator.is_required)
        ):
            self.__dict__["manymesh_untouched"] = logits.clone()
        apply_bias(self, logits)

    def prepare_min(self: Any) -> None:
        _prepare_min_new_tokens(self)

    def prepare_repetition(self: Any) -> None:
        """Prompts count too, and what was sampled before the request was put off."""
        import torch

        repetition(self)
        for row, req in enumerate(self.orchestrator.reqs()):
            if _kind(req) is not None and (penalty := req.sampling_params.repetition_penalty) != 1:
                token_ids = torch.tensor([*req.origin_input_ids, *req.output_ids], dtype=torch.int64)
                self.cumulated_repetition_penalties[row, token_ids.to(self.orchestrator.device)] = penalty

    def with_temperatures(cls: Any, forward_batch: Any) -> Any:
        """SGLang's log-probabilities of prompts are of the logits as they are; those of our scores are tempered."""
        metadata = from_forward(cls, forward_batch)
        info = forward_batch.sampling_info
        if metadata.extend_return_logprob and info is not None and info.sampling_seed is not None:
            metadata.manymesh_temperatures = _score_temperatures(info)
        return metadata

    def of_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        temperatures = getattr(kwargs["logits_metadata"], "manymesh_temperatures", None)
        if temperatures is not None:
            by_row = temperatures[kwargs["token_to_seq_idx"]]
            kwargs["get_logits_fn"] = Tempered(kwargs["get_logits_fn"], by_row)
        return input_forward(self, *args, **kwargs)

    if getattr(Req, "_manymesh", False):
        return
    token_finish, string_finish = _method(Req, "_check_token_based_finish"), _method(Req, "_check_str_based_finish")
    from_batch = _method(SamplingBatchInfo, "from_schedule_batch").__func__
    apply_bias = _method(SamplingBatchInfo, "apply_logits_bias")
    _method(BatchedMinNewTokensPenalizer, "_prepare")
    repetition = _method(BatchedRepetitionPenalizer, "_prepare")
    from_forward = _method(LogitsMetadata, "from_forward_batch").__func__
    input_forward = _method(InputLogprobProcessor, "forward")
    LogitsMetadata.from_forward_batch = classmethod(with_temperatures)
    InputLogprobProcessor.forward = of_inputs
    Req._check_token_based_finish = of_token
    Req._check_str_based_finish = of_string
    SamplingBatchInfo.from_schedule_batch = classmethod(with_streams)
    SamplingBatchInfo.apply_logits_bias = keep_untouched
    BatchedMinNewTokensPenalizer._prepare = prepare_min
    BatchedRepetitionPenalizer._prepare = prepare_repetition
    Req._manymesh = True


class Tempered:
    """SGLang's function from hidden states to logits, called for one run of rows after another, with their logits
    divided.

    Args:
        temperatures: by row of all runs.
    """

    def __init__(self, logits_of: Any, temperatures: Any) -> None:
        self._logits_of, self._temperatures, self._num_rows = logits_of, temperatures, 0

    def __call__(self, states: Any, *args: Any, **kwargs: Any) -> Any:
        start, self._num_rows = self._num_rows, self._num_rows + len(states)
        return self._logits_of(states, *args, **kwargs).float() / self._temperatures[start : self._num_rows, None]


def _score_temperatures(info: Any) -> Any:
    """By request of a batch: a score's temperature, and 1 for what is none."""
    import torch

    is_score = (info.sampling_seed & 3) == KINDS.index(SCORE)
    return torch.where(is_score, info.temperatures.view(-1), 1.0)


def _method(owner: Any, name: str) -> Any:
    """A method that the class itself has. Raises AttributeError where this SGLang has none of that name."""
    method = vars(owner).get(name)
    if method is None:
        raise AttributeError(f"manymesh-sglang doesn't know this SGLang: {owner.__name__} has no {name}")
    return method


def _kind(req: Any) -> str | None:
    """The kind of log-probabilities that a request of ours asks for; None for others' requests."""
    params = req.sampling_params.custom_params
    return params.get(KIND) if isinstance(params, dict) else None


def _stream(req: Any) -> int:
    """Seed and kind in an int64 that SGLang carries along as a batch's rows come and go."""
    seed = req.sampling_params.sampling_seed
    if seed is None:
        seed = _fresh_seed(req.rid)
    kind = KINDS.index(_kind(req) or "temperature")
    return int(seed % 2**SEED_BITS) << 2 | kind


_numbers = count()  # of requests without a seed


def _fresh_seed(request_id: str) -> int:
    """One that the processes which hold a model together agree on: they see the same requests in the same order.

    SGLang makes up the ids of requests that have none. A client that uses an id again gets other tokens.
    """
    digest = hashlib.blake2b(f"{next(_numbers)} {request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> (64 - SEED_BITS)


def _prepare_min_new_tokens(penalizer: Any) -> None:
    """As SGLang's, but for whatever tokens end the request, with or without a tokenizer, and from where it stands."""
    import torch

    orchestrator = penalizer.orchestrator
    reqs, device = orchestrator.reqs(), orchestrator.device
    penalizer.min_new_tokens = torch.tensor(
        [[req.sampling_params.min_new_tokens] for req in reqs], dtype=torch.int32, device=device
    )
    penalizer.len_output_tokens = torch.tensor(
        [[len(req.output_ids)] for req in reqs], dtype=torch.int32, device=device
    )
    at = [(row, token) for row, req in enumerate(reqs) for token in sorted(_ends(req, orchestrator.vocab_size))]
    rows, tokens = torch.tensor(at, dtype=torch.int64).view(-1, 2).to(device).unbind(1)
    stops = torch.zeros((len(reqs), orchestrator.vocab_size), dtype=torch.float32, device=device)
    stops[rows, tokens] = -torch.inf  # only the stops' places cross to the device
    penalizer.stop_token_penalties = stops


def _ends(req: Any, vocab_size: int) -> set[int]:
    ends = set(req.sampling_params.stop_token_ids or ())
    if _kind(req) is None:
        ends |= set(req.eos_token_ids or ())
        if req.tokenizer is not None:
            ends |= {req.tokenizer.eos_token_id, *(getattr(req.tokenizer, "additional_stop_token_ids", None) or ())}
    return {token for token in ends if token is not None and token < vocab_size}
