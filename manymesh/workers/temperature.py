"""The temperature of a call is the one that the rows were sampled at."""

from __future__ import annotations

from collections.abc import Set

from tensordict import TensorDict

from core.batch import metadata
from core.errors import Refused

OF_A_DISTRIBUTION = frozenset({"log_probs", "entropy", "top_log_probs"})  # model outputs that depend on the temperature


def check_temperature(batch: TensorDict, temperature: float, outputs: Set[str]) -> None:
    """Raises Refused, alike on all ranks, where outputs would be of another distribution than the sampled one.

    Args:
        batch: with the metadata `rollout_temperature`; one that lacks it is not checked.
        temperature: of the call.
        outputs: of the model, that the call computes.
    """
    if not OF_A_DISTRIBUTION & outputs:
        return
    sampled_at = metadata(batch, "rollout_temperature", temperature)
    if sampled_at != temperature:
        raise Refused(
            "the rows were sampled at another temperature",
            have=f"temperature={temperature}",
            want=f"temperature={sampled_at}, the batch's metadata rollout_temperature",
            mend=f"pass temperature={sampled_at}, or exclude rollout_temperature from the batch where another is meant",
        )
