"""The steps, in order."""

from __future__ import annotations

from collections.abc import Sequence

from core.errors import Refused
from sdk.gpu.step import Step

STEPS: tuple[Step, ...] = (
    Step(
        "00",
        "inventory",
        60,
        "What the doctor finds; versions of torch, CUDA, NCCL; free memory; which libraries import; the variables that"
        " steer CUDA, NCCL and Ray.",
        "sdk.gpu.machine:inventory",
    ),
    Step(
        "01",
        "device and world",
        30,
        "A rank takes the device that is its own, whatever its number on the node; a world of one opens with its"
        " collectives; a process that is shown no GPU runs on CPU.",
        "sdk.gpu.machine:device_and_world",
    ),
    Step(
        "02",
        "log-probabilities",
        60,
        "token_outputs in fp32 and bf16 against log_softmax in fp64, and a backward pass; time and peak memory for"
        " 16,384 tokens of a vocabulary of 151,936.",
        "sdk.gpu.numbers:log_probabilities",
    ),
    Step(
        "03",
        "digests and buckets",
        30,
        "A digest is the same on device and CPU, whatever size and offset; a model cut into buckets and joined again is"
        " the same to the bit, also where two streams do it.",
        "sdk.gpu.numbers:digests_and_buckets",
    ),
    Step(
        "04",
        "fsdp, conformance",
        120,
        "The conformance kit's tests of numbers, life, weights and checkpoints on the FSDP engine in fp32.",
        "sdk.gpu.fsdp:engine_suite",
    ),
    Step(
        "05",
        "fsdp in bf16",
        120,
        "A model of a billion parameters with fp32 parameters, passes in bf16 and recomputing: tokens a second against"
        " a bare loop on FSDP2 and against fp32, waits for the device, peak memory by number of micro-batches.",
        "sdk.gpu.fsdp:mixed_precision",
    ),
    Step(
        "06",
        "small steps",
        45,
        "Whether 20 steps of learning rate 1e-6 move the parameters, with fp32 parameters and with bf16 ones, which an"
        " engine may refuse.",
        "sdk.gpu.fsdp:small_steps",
    ),
    Step(
        "07",
        "fsdp, offload",
        90,
        "State sent to the CPU and fetched again: the next step is the same, the device is empty meanwhile, GB a second"
        " each way; what a step leaves behind; checkpoints of offloaded state.",
        "sdk.gpu.fsdp:offload",
    ),
    Step(
        "08",
        "one process",
        90,
        "Weights from the FSDP engine to transformers' generate in the same process, in fp32 and bf16: greedy tokens"
        " and log-probabilities before and after a step, the gap between sampler and trainer, seeds, memory given back,"
        " GB a second of an update and tokens a second of sampling.",
        "sdk.gpu.rollouts:same_process",
    ),
    Step(
        "09",
        "transfers",
        120,
        "Buckets between two processes on one machine by each kind of transfer that is installed: to the bit, GB a"
        " second; where two ends on one GPU cannot meet, a refusal within the deadline, after which both go on.",
        "sdk.gpu.transfers:two_processes",
    ),
    Step(
        "10",
        "megatron",
        150,
        "The conformance kit's tests on the Megatron engine, tensor parallel 1; with what it computes in bf16; what"
        " eval_mode holds of an engine whose parameters are offloaded.",
        "sdk.gpu.megatron:engine",
    ),
    Step(
        "11",
        "vllm",
        180,
        "What step 08 measures, with vLLM in the trainer's process and a model of a billion parameters in bf16; tokens"
        " a second of bare vLLM.",
        "sdk.gpu.rollouts:vllm",
    ),
    Step(
        "12",
        "sglang",
        180,
        "What step 08 measures, with SGLang beside the trainer; the environment before and after its engine starts.",
        "sdk.gpu.rollouts:sglang",
    ),
    Step(
        "13",
        "recipe",
        120,
        "GRPO on a tiny model in one process: the reward rises, and a seed gives the same metrics again.",
        "sdk.gpu.recipe:grpo",
    ),
)


def select(only: str = "") -> Sequence[Step]:
    """The steps of numbers like "04,05", in the outline's order; all of them where nothing is asked for.

    Raises:
        Refused: there is no step of that number.
    """
    numbers = [each.strip().zfill(2) for each in only.split(",") if each.strip()]
    legal = [step.number for step in STEPS]
    unknown = [number for number in numbers if number not in legal]
    if unknown:
        raise Refused(f"no step has the number {unknown[0]}", have=only, want=f"some of {','.join(legal)}")
    return [step for step in STEPS if not numbers or step.number in numbers]
