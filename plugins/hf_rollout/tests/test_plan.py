"""What is known before a model is loaded."""

from __future__ import annotations

import pytest

from core.config import structure
from core.errors import ConfigError, Refused
from core.mesh import MeshLayout
from manymesh_hf.config import HfRolloutConfig
from manymesh_hf.plan import plan


def test_every_rank_is_its_own_dp_rank() -> None:
    layout_plan = plan(HfRolloutConfig("x"), 3, None)
    assert (layout_plan.layout, layout_plan.views) == (MeshLayout.of(dp=3), {})
    assert layout_plan.route.dp_ranks == layout_plan.route.collectors == (0, 1, 2)
    with pytest.raises(Refused, match="world size 0"):
        plan(HfRolloutConfig("x"), 0, None)


def test_the_config_is_checked() -> None:
    assert structure(HfRolloutConfig, {"model": "x", "max_batch_rows": 2}).max_batch_rows == 2
    with pytest.raises(ConfigError, match="max_batch_rows"):
        structure(HfRolloutConfig, {"model": "x", "max_batch_rows": 0})
