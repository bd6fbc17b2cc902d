"""The contract, by the conformance kit."""

from sdk.conformance import EngineConformance


class TestFsdp(EngineConformance):
    backend = "fsdp"
