"""The Megatron engine against a bare megatron-core loop, two gloo ranks: `python -m benchmarks.megatron_step`.

| case | ours | floor |
|---|---|---|
| tp2-1m, tp2-25m | a step: zero_grad, forward_backward, optimizer_step | the same parts driven directly, its own loss |
| pp2-1m, pp2-25m | the same over a pipeline of two | the same, with shapes known in advance |
| export-tp2, export-pp2 | every tensor by export_weights, on both ranks | copying as many bytes |

Four micro-batches of two rows of 64 tokens. Both compute the same loss: the gradient norms are compared first.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks._pairs import Case, measure, report
from core.config import OptimizerConfig
from core.loss import LossScale, Metric
from sdk.testing import RankPool, preload, tiny_model

ROWS, TOKENS, MICRO_BATCHES = 2, 64, 4
OPTIMIZER = OptimizerConfig(lr=1e-4, weight_decay=0.1)
MODELS: dict[str, dict[str, int]] = {
    "1m": {"vocab_size": 2048, "hidden_size": 128, "intermediate_size": 384, "num_layers": 4},
    "25m": {"vocab_size": 8192, "hidden_size": 384, "intermediate_size": 1024, "num_layers": 12},
}


class NextToken:
    """The mean cross-entropy of all but each row's first token."""

    needs = frozenset({"log_probs"})

    def __call__(
        self, outputs: Mapping[str, torch.Tensor], batch: TensorDict, scale: LossScale
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        return -outputs["log_probs"].sum() / scale.num_tokens, {}


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the Megatron engine against a bare megatron-core loop.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--pairs", type=int, default=15)
    args = parser.parse_args()
    preload("manymesh_megatron.engine")
    cases: list[Case] = []
    with tempfile.TemporaryDirectory() as folder, RankPool(2, timeout_s=1200) as ranks:
        for size, shape in MODELS.items():
            heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
            model = tiny_model(f"{folder}/{size}", "llama", **(heads | shape))
            for name, sizes in (("tp2", {"tensor_parallel": 2}), ("pp2", {"pipeline_parallel": 2})):
                cases += ranks.run(on_rank, f"{name}-{size}", model, sizes, args.pairs, export=size == "25m")[0]
    report(cases, args.json)


def on_rank(
    rank: int, world_size: int, name: str, model: str, sizes: Mapping[str, Any], pairs: int, export: bool
) -> list[Case]:
    from manymesh_megatron.config import MegatronConfig
    from manymesh_megatron.engine import MegatronEngine

    config = MegatronConfig(model, optimizer=OPTIMIZER, **sizes).on("cpu")
    engine = MegatronEngine(config, "cpu")
    engine.initialize()
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(3, 2000, (ROWS, TOKENS), generator=generator) for _ in range(MICRO_BATCHES)]
    scale = LossScale(ROWS * (TOKENS - 1) * MICRO_BATCHES, ROWS * MICRO_BATCHES)
    mask = torch.ones(ROWS, TOKENS, dtype=torch.bool)
    batches = [TensorDict({"input_ids": each, "attention_mask": mask}, batch_size=[ROWS]) for each in ids]

    def ours() -> float:
        with engine.train_mode():
            engine.optimizer_zero_grad()
            engine.forward_backward(batches, NextToken(), scale)
            return engine.optimizer_step().grad_norm

    floor = bare_loop(engine, config, ids, scale.num_tokens)
    norms = floor(), ours()
    if abs(norms[0] / norms[1] - 1) > 1e-4:
        raise RuntimeError(f"the two loops compute different gradients: norms {norms}")
    cases = [measure(name, floor, ours, pairs)]
    if export:
        whole = torch.cat([tensor.flatten() for _, tensor in engine.export_weights()])
        target = torch.empty_like(whole)
        layout = name.partition("-")[0]
        cases.append(
            measure(f"export-{layout}", lambda: target.copy_(whole), lambda: drain(engine.export_weights()), pairs)
        )
    engine.shutdown()
    return cases


def drain(stream: Any) -> None:
    for _ in stream:
        pass


def bare_loop(engine: Any, config: Any, ids: list[torch.Tensor], num_tokens: float) -> Callable[[], float]:
    """One step of megatron-core's own parts, as its training scripts put them together."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig as CoreOptimizerConfig
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.process_groups_config import ProcessGroupCollection

    from manymesh_megatron.model import build_chunks, transformer_config
    from manymesh_megatron.weights import MegatronWeights

    with engine._runtime.scope():
        transformer = transformer_config(config, engine._model, engine._runtime)
        transformer.variable_seq_lengths = False  # all micro-batches have one shape
        chunks = build_chunks(config, transformer, engine._model, engine._runtime, value_head=False)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        MegatronWeights(chunks, transformer, engine._model, groups).read_directory(config.model)
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        models = [DistributedDataParallel(transformer, ddp, chunk) for chunk in chunks]
        options = CoreOptimizerConfig(
            optimizer="adam",
            lr=OPTIMIZER.lr,
            weight_decay=OPTIMIZER.weight_decay,
            adam_beta2=OPTIMIZER.betas[1],
            clip_grad=OPTIMIZER.max_grad_norm,
            params_dtype=torch.float32,
            use_distributed_optimizer=True,
        )
        optimizer = get_megatron_optimizer(options, models, use_gloo_process_groups=False)
        transformer.finalize_model_grads_func = lambda chunks, tokens=None, **more: finalize_model_grads(
            chunks, None, **more
        )
    run = get_forward_backward_func()
    positions = torch.arange(TOKENS - 1).expand(ROWS, -1)

    def forward(batches: Any, model: Any) -> Any:
        rows = next(batches)
        losses = model(rows[:, :-1], positions, None, labels=rows[:, 1:].contiguous())

        def loss(output: torch.Tensor) -> Any:
            return output.sum() / num_tokens, torch.zeros((), dtype=torch.int), {}

        return losses, loss

    def step() -> float:
        with engine._runtime.scope():
            for model in models:
                model.zero_grad_buffer()
            optimizer.zero_grad()
            run(
                forward_step_func=forward,
                data_iterator=iter(ids),
                model=models[0],
                num_microbatches=len(ids),
                seq_length=TOKENS - 1,
                micro_batch_size=ROWS,
                forward_only=False,
            )
            return float(optimizer.step()[1])

    return step


if __name__ == "__main__":
    main()
