"""A GRPO step as one would write it by hand for one model and one task: the floor of benchmarks/grpo_step.py.

The same arithmetic as the demo's: transformers' generate with a copy of the weights on each rank, FSDP2, log-probs of
the old policy, group-normalised advantages, the clipped loss with its entropy bonus, AdamW, and the weights copied back
by full_tensor. No
batches cross processes, nothing is checked, planned or measured.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

_state: dict[str, Any] = {}


def setup(rank: int, world_size: int, model_path: str, data_path: str) -> None:
    """Load model and prompts on this rank."""
    import json

    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(rank)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    sampler = copy.deepcopy(model).eval()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    rows = [json.loads(line) for line in Path(data_path).read_text().splitlines()]
    _state.update(
        model=model,
        sampler=sampler,
        optimizer=optimizer,
        tokenizer=AutoTokenizer.from_pretrained(model_path),
        rows=rows,
        step=0,
    )


def step(rank: int, world_size: int, num_prompts: int, num_samples: int) -> float:
    """One step on this rank's share of the prompts; its mean reward."""
    model, sampler, optimizer, tokenizer = (_state[name] for name in ("model", "sampler", "optimizer", "tokenizer"))
    share = num_prompts // world_size
    first = _state["step"] * num_prompts + rank * share
    rows = [_state["rows"][(first + i) % len(_state["rows"])] for i in range(share)]
    _state["step"] += 1
    prompts = torch.tensor([tokenizer(row["prompt"])["input_ids"] for row in rows])
    width = prompts.shape[1]
    with torch.no_grad():
        ids = sampler.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            top_k=0,
            top_p=1.0,
            num_return_sequences=num_samples,
            max_new_tokens=4,
        )
        texts = tokenizer.batch_decode(ids[:, width:], skip_special_tokens=True)
        answers = [row["answer"] for row in rows for _ in range(num_samples)]
        rewards = torch.tensor(
            [
                sum(a == b for a, b in zip(answer, text, strict=False)) / len(answer)
                for answer, text in zip(answers, texts, strict=True)
            ]
        )
        groups = rewards.view(share, num_samples)
        advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        advantages = advantages.view(-1, 1)
        old, _ = response_log_probs(model, ids, width)
    response_mask = torch.ones_like(ids[:, width:], dtype=torch.bool)
    eos = tokenizer.eos_token_id
    response_mask[:, 1:] = (ids[:, width:-1] == eos).cumsum(1) == 0
    num_tokens = response_mask.sum().float()
    torch.distributed.all_reduce(num_tokens)
    log_probs, entropy = response_log_probs(model, ids, width)
    ratio = (log_probs - old).exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages) - 0.05 * entropy
    loss = (loss * response_mask).sum() / num_tokens
    (loss * world_size).backward()  # FSDP averages
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for mine, theirs in zip(sampler.parameters(), model.parameters(), strict=True):
            mine.copy_(theirs.full_tensor() if isinstance(theirs, DTensor) else theirs)
    return float(rewards.mean())


def response_log_probs(model: Any, ids: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the response's tokens and entropies, both (rows, response tokens)."""
    logits = model(input_ids=ids, use_cache=False).logits[:, width - 1 : -1]
    log_softmax = logits.log_softmax(-1)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    return log_softmax.gather(-1, ids[:, width:, None]).squeeze(-1), entropy
