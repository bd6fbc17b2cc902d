"""A rollout beside a trainer in one process: weights by WeightSync, and what the rollout then samples."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from core.batch import jagged, response_lengths, spread_over_response
from core.errors import Refused
from core.loss import LossSpec
from core.manifest import Capability
from core.registry import EngineRegistry
from core.rollout import SamplingParams
from core.transport.local import LocalWorkerGroup
from manymesh.recipes.grpo.advantage import group_advantages
from manymesh.workers import (
    ActorRolloutRefConfig,
    ActorRolloutRefWorker,
    RolloutWorkerConfig,
    TrainingWorkerConfig,
    WeightSync,
)
from sdk.conformance.closeness import BOUNDS
from sdk.gpu.step import StepRun
from sdk.gpu.tools import GIB, free_memory, need_backend, wait_for_device

POLICY_LOSS = "manymesh.recipes.grpo.loss:policy_loss"


@contextmanager
def beside_trainer(
    run: StepRun, backend: str, model: str, trainer: Mapping[str, Any], rollout: Mapping[str, Any]
) -> Iterator[Beside]:
    """A group of one rank with FSDP and a rollout, in this process.

    Args:
        trainer, rollout: options of the two.

    Raises:
        Absent: the rollout cannot be used here.
    """
    need_backend("fsdp", "engine")
    need_backend(backend, "rollout")
    config = ActorRolloutRefConfig(
        role="actor_rollout",
        actor=TrainingWorkerConfig(
            backend="fsdp",
            engine={"model": model, "optimizer": {"lr": 1e-3}, **trainer},
            loss=LossSpec(POLICY_LOSS),
            device=run.device,
        ),
        rollout=RolloutWorkerConfig(backend=backend, engine={"model": model, **rollout}, device=run.device),
    )
    with LocalWorkerGroup(ActorRolloutRefWorker, config) as group:
        group.init_model()
        yield Beside(run, group, backend, str(rollout.get("dtype", "float32")))
    free_memory(run)


class Beside:
    """What is measured of the pair.

    Attributes:
        dtype: of the rollout's weights: to its bounds its samples are held.
    """

    def __init__(self, run: StepRun, group: Any, backend: str, dtype: str) -> None:
        self.run, self.group, self.dtype = run, group, dtype
        self.manifest = EngineRegistry.get(backend, kind="rollout").manifest
        self.sync = WeightSync(group, group)

    def offers(self, capability: Capability) -> bool:
        return capability in self.manifest.capabilities

    def generate(self, prompts: TensorDict, **options: Any) -> TensorDict:
        batch: TensorDict = self.group.generate_sequences(prompts, SamplingParams(**options))
        return batch

    def train(self, prompts: TensorDict) -> None:
        """One step of GRPO whose reward is the share of even tokens, so that all rows have an advantage."""
        batch = self.generate(prompts, num_samples=4, max_new_tokens=8, ignore_eos=True, seed=self.seed(1))
        batch["old_log_probs"] = self.group.compute_log_prob(batch, temperature=1.0)["old_log_probs"]
        rewards = torch.tensor([row.remainder(2).float().mean().item() for row in batch["input_ids"].unbind()])
        advantages = group_advantages(rewards, batch["prompt_id"])
        batch["advantages"] = spread_over_response(advantages, batch["response_mask"])
        self.group.update_actor(batch, temperature=1.0)

    def seed(self, number: int) -> int | None:
        """Where rows can have seeds."""
        return number if self.offers(Capability.ROW_SEEDS) else None

    def update(self, name: str = "an update") -> None:
        """Hand the weights over, with time and GB a second."""
        wait_for_device(self.run)
        start = time.perf_counter()
        version = self.sync.sync()
        wait_for_device(self.run)
        seconds = time.perf_counter() - start
        size = self.weight_bytes()
        self.run.figure(name, size / seconds / 1e9, "GB/s", f"{size / GIB:.2f} GiB in {seconds:.2f} s")
        have = self.group.rollout_version()
        self.run.check("the rollout has the trainer's version", have == version, f"have {have}, want {version}")

    def weight_bytes(self) -> int:
        """In the rollout's dtype."""
        _, specs = self.group.offer_weights()
        itemsize = getattr(torch, self.dtype).itemsize
        return sum(torch.Size(spec.shape).numel() * itemsize for spec in specs)

    def check_greedy(self, prompts: TensorDict, what: str) -> None:
        """Greedy tokens against the trainer's own weights in transformers and fp32: each is the likeliest, or as
        likely within the bounds of the dtype; and its log-probability is near."""
        from transformers import AutoModelForCausalLM

        directory = Path(self.run.folder, "exported")
        self.group.export_model(str(directory))
        reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).to(self.run.device).eval()
        batch = self.generate(prompts, temperature=0.0, max_new_tokens=16)
        gaps, errors = [0.0], [0.0]
        for ids, mask, log_probs in _rows(batch):
            with torch.no_grad():
                logits = reference(ids[None].to(self.run.device)).logits[0, :-1].float().cpu()
            table, sampled = logits.log_softmax(-1), mask[1:]
            chosen = table.gather(1, ids[1:, None])[:, 0]
            gaps.append(float((table.amax(-1) - chosen)[sampled].max()))
            errors.append(float((log_probs[1:] - chosen)[sampled].abs().max()))
        bounds = BOUNDS[self.dtype]
        gap, error = max(gaps), max(errors)
        self.run.check(f"greedy tokens {what}", gap < bounds.sampled, f"{gap:.2g} below the likeliest")
        self.run.check(f"their log-probs {what}", error < bounds.sampled, f"largest error {error:.2g}")
        del reference
        free_memory(self.run)

    def measure_gap(self, prompts: TensorDict) -> None:
        """How far the sampler's log-probs are from the trainer's, of the same tokens."""
        batch = self.generate(prompts, num_samples=4, max_new_tokens=16, seed=self.seed(2))
        own = self.group.compute_log_prob(batch, temperature=1.0)["old_log_probs"]
        parts = [(theirs - ours)[mask] for (_, mask, theirs), ours in zip(_rows(batch), own.unbind(), strict=True)]
        gap = torch.cat(parts).abs()
        self.run.figure("log-probs, sampler against trainer, mean", gap.mean().item(), "nats")
        self.run.figure("log-probs, sampler against trainer, largest", gap.max().item(), "nats")

    def check_seeds(self, prompts: TensorDict) -> None:
        """One seed gives one answer; no seed gives another each time; the process's generators stay as they are."""
        before = _generators(self.run)
        options: dict[str, Any] = {"num_samples": 2, "max_new_tokens": 16, "ignore_eos": True}
        if self.offers(Capability.ROW_SEEDS):
            first, second = (_tokens(self.generate(prompts, seed=7, **options)) for _ in range(2))
            self.run.check("a seed gives the same rows again", first == second)
            few = _tokens(self.generate(prompts[:1], seed=7, **options))
            alike = sum(a == b for a, b in zip(few, first, strict=False)) / len(few)
            self.run.figure("rows that are the same in a smaller batch", alike)
        one, other = (_tokens(self.generate(prompts, **options)) for _ in range(2))
        self.run.check("without a seed rows differ from call to call", one != other)
        self.run.check("the process's generators are left alone", before == _generators(self.run))

    def check_release(self, prompts: TensorDict) -> None:
        """Memory that the rollout gives back, and the same answer after it has come again."""
        want = _tokens(self.generate(prompts, temperature=0.0, max_new_tokens=8))
        free = self._free()
        try:
            self.group.release_rollout()
        except Refused as refused:
            self.run.absent("release", refused.message)
            return
        if self.run.on_cuda:
            gained = self._free() - free
            self.run.figure("memory given back", gained / GIB, "GiB")
            self.run.check("it is at least the weights", gained >= 0.9 * self.weight_bytes())
        self.sync.sync()
        have = _tokens(self.generate(prompts, temperature=0.0, max_new_tokens=8))
        self.run.check("after release and an update it samples the same", have == want)

    def _free(self) -> int:
        if not self.run.on_cuda:
            return 0
        free_memory(self.run)
        return int(torch.cuda.mem_get_info()[0])

    def speed(self, prompts: TensorDict, new_tokens: int, name: str, **options: Any) -> None:
        """Tokens a second of one call, the second of two."""
        sampling: dict[str, Any] = {"max_new_tokens": new_tokens, "ignore_eos": True, **options}
        self.generate(prompts, **sampling)
        wait_for_device(self.run)
        start = time.perf_counter()
        batch = self.generate(prompts, **sampling)
        seconds = time.perf_counter() - start
        number = int(response_lengths(batch["response_mask"]).sum())
        self.run.figure(name, number / seconds, "tokens/s", f"{len(batch)} rows of {new_tokens}")


def pairs(run: StepRun, backend: str, model: str, trainer: Mapping[str, Any], rollout: Mapping[str, Any]) -> None:
    """All of it on one pair: update, greedy rows before and after a step, gap, seeds, release, speed."""
    prompts = some_prompts(8, 12)
    with beside_trainer(run, backend, model, trainer, rollout) as pair:
        pair.update("the first update")
        with run.part("greedy"):
            pair.check_greedy(prompts, "before a step")
        with run.part("a step of training"):
            pair.train(prompts)
            pair.update("an update after a step")
            pair.check_greedy(prompts, "after a step")
        for name, check in {
            "the gap": pair.measure_gap,
            "seeds": pair.check_seeds,
            "release": pair.check_release,
        }.items():
            with run.part(name):
                check(prompts)
        with run.part("speed"):
            rows, new_tokens = (256, 128) if run.on_cuda else (8, 8)
            pair.speed(some_prompts(rows, 12), new_tokens, "sampling", seed=pair.seed(1))
            pair.speed(some_prompts(rows, 12), new_tokens, "sampling with top-p 0.9", seed=pair.seed(1), top_p=0.9)
            pair.speed(some_prompts(rows, 12), new_tokens, "sampling, greedy", temperature=0.0)


def some_prompts(number: int, length: int) -> TensorDict:
    """Random prompts of the tokens of tiny models, of lengths from half of `length` on."""
    generator = torch.Generator().manual_seed(number)
    lengths = [length - i % (length // 2) for i in range(number)]
    batch = TensorDict({}, batch_size=[number])
    batch.set("prompt_ids", jagged([torch.randint(3, 64, (each,), generator=generator) for each in lengths]))
    return batch


def _rows(batch: TensorDict) -> Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Ids, response mask and the rollout's log-probs of each row, on the CPU."""
    columns = (batch[name].unbind() for name in ("input_ids", "response_mask", "rollout_log_probs"))
    return [(ids.cpu(), mask.cpu().bool(), values.cpu()) for ids, mask, values in zip(*columns, strict=True)]


def _tokens(batch: TensorDict) -> list[list[int]]:
    return [ids[mask].tolist() for ids, mask, _ in _rows(batch)]


def _generators(run: StepRun) -> list[bytes]:
    states = [torch.get_rng_state()] + ([torch.cuda.get_rng_state()] if run.on_cuda else [])
    return [state.numpy().tobytes() for state in states]
