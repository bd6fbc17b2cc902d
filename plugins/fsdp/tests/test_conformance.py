"""The contract, by the conformance kit."""

import pytest

from sdk.conformance import EngineConformance
from sdk.conformance.suites.engine_numbers import NumbersSuite


class TestFsdp(EngineConformance):
    backend = "fsdp"


@pytest.mark.ci
class TestFsdpWithPassesInBf16(NumbersSuite):
    backend = "fsdp"
    worlds = (1,)
    dtype = "bfloat16"
    config = {"dtype": "float32", "compute_dtype": "bfloat16"}  # noqa: RUF012
