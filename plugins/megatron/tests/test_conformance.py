"""The contract, by the conformance kit: both kinds of model, without and with parallel parts."""

from sdk.conformance import EngineConformance


class TestMegatron(EngineConformance):
    backend = "megatron"


class TestMegatronTensorAndPipelineParallel(EngineConformance):
    backend = "megatron"
    config = {"tensor_parallel": 2, "pipeline_parallel": 2}  # noqa: RUF012
    worlds = (4,)


class TestMegatronValueModel(EngineConformance):
    backend = "megatron"
    model_type = "value_model"
