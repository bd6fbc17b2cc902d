"""How a request of ours is known in SGLang's processes. Imports nothing heavy."""

from __future__ import annotations

from core.rollout import LogProbKind

SWITCH = "MANYMESH_SGLANG_SAMPLER"  # "1" in the environment of SGLang's processes: they sample our way
KIND = "manymesh_log_probs"  # in SGLang's custom_params of a request
SCORE = "score"  # a kind of its own: log-probabilities of the prompt, of logits / temperature
KINDS = (*LogProbKind, SCORE)
SEED_BITS = 61  # SGLang's seeds are an int64, of which the sampler takes two bits for the kind
