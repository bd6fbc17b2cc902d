"""A backend that lacks a part of its base hears of it at construction, by name."""

from __future__ import annotations

from typing import Any

import pytest

from manymesh.parts.base_rollout import BaseReleasingRollout, BaseRollout
from manymesh.parts.engine_base import EngineBase, OffloadEngineBase
from manymesh.parts.model_engine import ModelEngine
from manymesh.parts.model_rollout import ModelRollout
from manymesh.parts.server_rollout import ReleasingServerRollout, ServerRollout

ENGINE = {"initialize", "forward_backward", "export_weights"}
WEIGHTS = {"weight_specs", "load_weights", "_set_training"}
ROLLOUT = {"generate", "_build", "_load"}
SERVER = {"_start", "_requests", "_score_limits"}


@pytest.mark.parametrize(
    ("base", "parts"),
    [
        (EngineBase, ENGINE | WEIGHTS),
        (OffloadEngineBase, ENGINE | WEIGHTS | {"_move"}),
        (ModelEngine, ENGINE),
        (BaseRollout, ROLLOUT),
        (BaseReleasingRollout, ROLLOUT | {"_release_memory", "_resume_memory"}),
        (ModelRollout, {"generate", "_load_model"}),
        (ServerRollout, SERVER),
        (ReleasingServerRollout, SERVER),
    ],
)
def test_a_backend_that_lacks_one_part_cannot_be_made_and_hears_which(base: Any, parts: set[str]) -> None:
    assert base.__abstractmethods__ == parts
    for lacking in parts:
        members = {name: lambda *args, **kwargs: None for name in parts - {lacking}}
        with pytest.raises(TypeError, match=rf"abstract method '?{lacking}'?"):
            type("Backend", (base,), {**members, "__init__": lambda self: None})()
    type("Backend", (base,), {**dict.fromkeys(parts, lambda *args: None), "__init__": lambda self: None})()
