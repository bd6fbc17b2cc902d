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
| rewards | rows | fp32 | |
| prompt_id | rows | int64 | rows of one prompt share it (the group of GRPO) |
| group_id | rows | int64 | rows that share it stay together; see below |
| weight_version | rows | int64 | the policy version that sampled the row |
| weight_versions | rows | object | of a server: [(version, number of tokens), ...] in the order of the response |
| finish_reason | rows | object | "stop", "length" or "abort" |
| row_weight | rows | fp32 | 1 for a real row, 0 for filler; every denominator uses it |
| prompt_ids | rows, tokens | int64 | input of generate |

`group_id` keeps rows on one dp rank, in one mini-batch and in one micro-batch, wherever in the batch they are. It is
set only where a loss needs several rows at once, such as the two of a pair. GRPO's groups need no such thing.

Metadata of a batch are a record, never a knob: `log_prob_kind`, and `rollout_temperature` (float), the temperature that
a rollout sampled the rows at. Greedy rows (temperature 0) are recorded at 1, since their log-probs are the untempered
model's. The temperature at which a trainer computes log_probs and entropy is an argument of the call; a batch with
`rollout_log_probs` that was sampled at another temperature is refused, so that trainer and rollout speak of the same
distribution.
"""
