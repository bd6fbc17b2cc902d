"""What "auto" is on a device: pure functions of the option and the device."""

from __future__ import annotations

from typing import Any

import pytest

from core.config import EngineConfig, RolloutConfig, left_to_device, structure
from core.errors import ConfigError


@pytest.mark.parametrize(
    ("config", "device", "dtype"),
    [
        (RolloutConfig("m"), "cpu", "float32"),
        (RolloutConfig("m"), "cuda", "bfloat16"),
        (RolloutConfig("m"), "npu", "bfloat16"),
        (RolloutConfig("m", dtype="float16"), "cpu", "float16"),
        (EngineConfig("m"), "cpu", "float32"),
        (EngineConfig("m"), "cuda", "float32"),
        (EngineConfig("m", dtype="bfloat16"), "cuda", "bfloat16"),
    ],
)
def test_auto_is_float32_on_cpu_and_on_gpus_what_each_kind_wants(config: Any, device: str, dtype: str) -> None:
    assert config.on(device).dtype == dtype
    assert config.on(device).on("cpu") == config.on(device), "what is settled stays so"


def test_what_was_left_to_the_device_is_told_and_nothing_else() -> None:
    assert left_to_device(RolloutConfig("m"), "cuda") == {"dtype": "bfloat16"}
    assert left_to_device(RolloutConfig("m", dtype="float32"), "cuda") == {}
    assert left_to_device(object(), "cuda") == {}


def test_auto_is_a_word_in_yaml() -> None:
    assert structure(RolloutConfig, {"model": "m", "dtype": "auto"}) == RolloutConfig("m")
    with pytest.raises(ConfigError, match="dtype"):
        structure(RolloutConfig, {"model": "m", "dtype": "automatic"})
