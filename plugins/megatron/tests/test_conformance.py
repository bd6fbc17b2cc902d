"""The contract, by the conformance kit: both kinds of model, without and with parallel parts."""

import pytest

from sdk.conformance import EngineConformance


@pytest.mark.ci
class TestMegatron(EngineConformance):
    backend = "megatron"


@pytest.mark.ci
class TestMegatronPipelineParallel(EngineConformance):
    backend = "megatron"
    config = {"pipeline_parallel": 2}  # noqa: RUF012
    worlds = (2,)


@pytest.mark.slow
class TestMegatronTensorAndPipelineParallel(EngineConformance):
    backend = "megatron"
    config = {"tensor_parallel": 2, "pipeline_parallel": 2}  # noqa: RUF012
    worlds = (4, 8)


@pytest.mark.ci
class TestMegatronValueModel(EngineConformance):
    backend = "megatron"
    model_type = "value_model"
