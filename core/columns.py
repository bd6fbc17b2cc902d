"""The columns of a batch.

A batch is a TensorDict, one row a sequence (prompt then response). Token columns are aligned with `input_ids`: the
value at position t belongs to token t, so log_probs[t] = log p(input_ids[t] | input_ids[:t]) and log_probs[0] = 0.
Likewise values[t] is the value of the prefix input_ids[:t], the state in which token t was chosen (read off the model
at position t - 1), and values[0] = 0.
Between driver and workers token columns are jagged (nested tensors that share their offsets); micro-batches are padded
on the right, (rows, tokens) with `attention_mask`. Either form is accepted by worker methods.

| column | shape | dtype | meaning |
|---|---|---|---|
| input_ids | rows, tokens | int64 | |
| attention_mask | rows, tokens | bool | padded form only |
| response_mask | rows, tokens | bool | tokens that the policy sampled: the ones a policy loss counts |
| rollout_log_probs | rows, tokens | fp32 | by the rollout; kind in the batch's metadata `log_prob_kind` |
| old_log_probs, ref_log_probs, entropy, values, advantages, returns | rows, tokens | fp32 | |
| teacher_ids | rows, tokens, k | int64 | k candidates for each token; at position 0 any ids of the vocabulary |
| teacher_log_probs | rows, tokens, k | fp32 | a teacher's log-probs of them; not read by engines |
| top_log_probs | rows, tokens, k | fp32 | the model's own log-probs of teacher_ids; 0 at position 0 |
| rewards | rows | fp32 | |
| prompt_id | rows | int64 | rows of one prompt share it (the group of GRPO) |
| group_id | rows | int64 | rows that share it stay together; see below |
| weight_version | rows | int64 | the policy version that sampled the row |
| weight_versions | rows | object | of a server: [(version, number of tokens), ...] in the order of the response |
| finish_reason | rows | object | "stop", "length" or "abort" |
| row_weight | rows | fp32 | 1 for a real row, 0 for filler; every denominator uses it |
| prompt_ids | rows, tokens | int64 | input of generate |
| log_probs | rows, tokens | fp32 | answer of score: of the given tokens, by the rollout's weights |
| top_ids, top_log_probs | rows, tokens, k | int64, fp32 | answer of score: the k most likely tokens at each position |
| inputs/<name> | rows, ... | any | what a model reads beside tokens, under the model's own name for it |

A column under `inputs/` (`inputs/pixel_values`) holds no tokens: images, their sizes, audio. It is dense (rows, ...),
jagged (rows, items, ...) or an object column, passes as it is from prompts to the answer of generate (repeated for the
samples of a prompt) and on into micro-batches, and is never padded. A backend names those that it reads in its
manifest, without the prefix; a batch with others is refused before anything runs.

`group_id` keeps rows on one dp rank, in one mini-batch and in one micro-batch, wherever in the batch they are. It is
set only where a loss needs several rows at once, such as the two of a pair. GRPO's groups need no such thing.

Metadata of a batch are a record, never a knob: `log_prob_kind`, and `rollout_temperature` (float), the temperature that
a rollout sampled the rows at. Greedy rows (temperature 0) are recorded at 1, since their log-probs are the untempered
model's. The temperature at which a trainer computes log_probs and entropy is an argument of the call; a batch that
was sampled at another temperature is refused, so that trainer and rollout speak of the same
distribution.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from core.errors import Refused

# What a rollout answers to generate.
GENERATED = frozenset(
    {"input_ids", "response_mask", "rollout_log_probs", "prompt_id", "weight_version", "finish_reason", "row_weight"}
)
INPUTS = "inputs/"


def model_inputs(columns: Iterable[str]) -> list[str]:
    """Of these columns, those that hold what a model reads beside tokens; sorted."""
    return sorted(name for name in columns if name.startswith(INPUTS))


def check_model_inputs(columns: Iterable[str], names: Collection[str], backend: str) -> None:
    """Refuse model inputs that a backend doesn't read.

    Args:
        columns: of a batch.
        names: that the backend reads, without the prefix.
        backend: how the error calls it.

    Raises:
        Refused: columns under `inputs/` that are not among them.
    """
    foreign = [name for name in model_inputs(columns) if name.removeprefix(INPUTS) not in names]
    if foreign:
        raise Refused(
            f"{backend} doesn't read the model inputs {', '.join(foreign)}",
            want=[f"{INPUTS}{name}" for name in sorted(names)] or "tokens alone",
            mend="leave these columns out, or choose a backend whose manifest names them",
        )
