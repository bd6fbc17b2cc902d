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
)


def select(only: str = "") -> Sequence[Step]:
    """The steps of numbers like "04,05", in the outline's order; all of them where nothing is asked for.

    Raises:
        Refused: there is no step of that number.
    """
    numbers = [each.strip().zfill(2) for each in only.split(",") if each.strip()]
    known = [step.number for step in STEPS]
    unknown = [number for number in numbers if number not in known]
    if unknown:
        raise Refused(f"no step has the number {unknown[0]}", have=only, want=f"some of {','.join(known)}")
    return [step for step in STEPS if not numbers or step.number in numbers]
