"""Faults of a rollout's weights, memory, beginning and end."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict

from core.engine import WeightSpec
from core.errors import Refused
from core.manifest import Capability
from core.registry import Backend
from core.rollout import SamplingParams
from manymesh.parts.base_rollout import Bucket
from sdk.conformance.suites.rollout_base import specs
from tests.sdk.kit.faults import capabilities, caught_by, entry_fault, with_manifest
from tests.sdk.kit.rollout_faults import GenerateFault, RolloutFault


@caught_by("test_what_the_old_weights_left_in_a_cache_is_not_used_after_an_update")
class KeepsCache(GenerateFault):
    """keeps the KV cache of prompts over an update"""

    def initialize(self) -> None:
        super().initialize()  # type: ignore[misc]
        model, cache = self._model, {}
        generate = model.generate

        def cached(ids: torch.Tensor, **options: Any) -> Any:
            if len(ids) > 1 or ids.shape[1] < 100:
                return generate(ids, **options)
            key = tuple(ids[0].tolist())
            if key not in cache:
                with torch.no_grad():
                    cache[key] = model(ids[:, :-1], use_cache=True).past_key_values
            return generate(ids, past_key_values=copy.deepcopy(cache[key]), **options)

        model.generate = cached


@caught_by(
    "test_it_is_the_reference_model_before_and_after_each_of_three_updates[untied]",
    "test_rows_say_which_weights_sampled_them_and_older_ones_may_be_refused",
)
class KeepsVersion(GenerateFault):
    """loads weights and keeps the old version"""

    @property
    def weight_version(self) -> int | None:
        return None if super().weight_version is None else 0

    def change_answer(self, out: TensorDict, sampling: SamplingParams) -> TensorDict:
        return out.set("weight_version", torch.zeros_like(out["weight_version"]))


@caught_by("test_rows_say_which_weights_sampled_them_and_older_ones_may_be_refused")
class IgnoresMinVersion(GenerateFault):
    """samples with weights that are too old"""

    def generate(self, batch: TensorDict, sampling: SamplingParams, *, min_version: int | None = None) -> TensorDict:
        return super().generate(batch, sampling)


@caught_by("test_it_is_the_reference_model_before_and_after_each_of_three_updates[untied]")
class SwapsKeysAndValues(RolloutFault):
    """loads keys as values"""

    def load_bucket(self, bucket: Bucket) -> None:
        swap = {"k_proj": "v_proj", "v_proj": "k_proj"}
        pairs = []
        for name, tensor in bucket:
            part = next((part for part in swap if part in name), None)
            pairs.append((name.replace(part, swap[part]) if part else name, tensor))
        super().load_bucket(pairs)  # type: ignore[misc]


@caught_by("test_weights_of_another_model_are_refused_and_the_old_ones_stay[an unknown name]")
class AcceptsUnknown(RolloutFault):
    """passes over names that the model doesn't know"""

    def begin_weight_update(self, weight_specs: Sequence[WeightSpec], version: int) -> None:
        own = self.own_weights()
        super().begin_weight_update([spec for spec in weight_specs if spec.name in own], version)  # type: ignore[misc]


@caught_by(
    "test_weights_of_another_model_are_refused_and_the_old_ones_stay[a missing name]",
    "test_an_incomplete_update_is_not_finished_and_generates_nothing",
)
class AcceptsMissing(RolloutFault):
    """leaves weights that don't come as they were in the checkpoint"""

    def begin_weight_update(self, weight_specs: Sequence[WeightSpec], version: int) -> None:
        names, own = {spec.name for spec in weight_specs}, self.own_weights()
        rest = [spec for spec in specs(own) if spec.name not in names]
        super().begin_weight_update([*weight_specs, *rest], version)  # type: ignore[misc]
        self._came: set[str] = set()

    def load_bucket(self, bucket: Bucket) -> None:
        super().load_bucket(bucket)  # type: ignore[misc]
        self._came |= {name for name, _ in bucket}

    def finish_weight_update(self) -> None:
        rest = [(name, tensor) for name, tensor in self.own_weights().items() if name not in self._came]
        super().load_bucket(rest)  # type: ignore[misc]
        super().finish_weight_update()  # type: ignore[misc]


@caught_by("test_weights_of_another_model_are_refused_and_the_old_ones_stay[another shape]")
class ChecksLate(RolloutFault):
    """refuses weights of another model when the update has begun"""

    def begin_weight_update(self, weight_specs: Sequence[WeightSpec], version: int) -> None:
        try:
            super().begin_weight_update(weight_specs, version)  # type: ignore[misc]
        except Refused:
            if self.weight_version is not None:
                super().begin_weight_update(specs(self.own_weights()), version)  # type: ignore[misc]
            raise


@caught_by("test_after_an_aborted_update_nothing_is_sampled_with_weights_that_are_not_whole[1]")
class TrustsAborted(RolloutFault):
    """takes the weights for whole after an update was aborted"""

    def begin_weight_update(self, weight_specs: Sequence[WeightSpec], version: int) -> None:
        before = self.weight_version
        super().begin_weight_update(weight_specs, version)  # type: ignore[misc]
        self._before, self._left = before, {spec.name for spec in weight_specs}

    def load_bucket(self, bucket: Bucket) -> None:
        super().load_bucket(bucket)  # type: ignore[misc]
        self._left -= {name for name, _ in bucket}

    def abort_weight_update(self) -> None:
        super().load_bucket([(n, t) for n, t in self.own_weights().items() if n in self._left])  # type: ignore[misc]
        super().finish_weight_update()  # type: ignore[misc]


@caught_by("test_tensors_may_be_reused_after_load_bucket")
class HoldsTensors(RolloutFault):
    """reads the sender's tensors when the update is finished"""

    def begin_weight_update(self, weight_specs: Sequence[WeightSpec], version: int) -> None:
        super().begin_weight_update(weight_specs, version)  # type: ignore[misc]
        self._held: list[tuple[str, torch.Tensor]] = []

    def load_bucket(self, bucket: Bucket) -> None:
        self._held += bucket

    def finish_weight_update(self) -> None:
        super().load_bucket(self._held)  # type: ignore[misc]
        super().finish_weight_update()  # type: ignore[misc]


@caught_by("test_a_bad_bucket_is_refused_as_a_whole")
class LoadsInPart(RolloutFault):
    """loads what comes before a bad tensor in its bucket"""

    def load_bucket(self, bucket: Bucket) -> None:
        for pair in bucket:
            super().load_bucket([pair])  # type: ignore[misc]


@caught_by("test_a_name_announced_twice_is_refused")
class AcceptsDoubled(RolloutFault):
    """takes a name that is announced twice for one"""

    def begin_weight_update(self, weight_specs: Sequence[WeightSpec], version: int) -> None:
        once = list({spec.name: spec for spec in weight_specs}.values())
        super().begin_weight_update(once, version)  # type: ignore[misc]


@caught_by("test_an_update_that_nobody_finished_is_forgotten_by_the_next")
class GoesOn(RolloutFault):
    """goes on with an update that nobody finished when the next one begins"""

    def begin_weight_update(self, weight_specs: Sequence[WeightSpec], version: int) -> None:
        if self.weight_version is not None:
            super().begin_weight_update(weight_specs, version)  # type: ignore[misc]


@caught_by("test_weights_of_another_precision_are_cast")
class RefusesHalves(RolloutFault):
    """refuses weights of another precision"""

    def begin_weight_update(self, weight_specs: Sequence[WeightSpec], version: int) -> None:
        if any(spec.dtype == "bfloat16" for spec in weight_specs):
            raise Refused("these weights have another precision")
        super().begin_weight_update(weight_specs, version)  # type: ignore[misc]


@caught_by("test_logits_that_are_not_finite_are_an_error")
class HidesNan(RolloutFault):
    """loads zeros for what is not a number"""

    def load_bucket(self, bucket: Bucket) -> None:
        super().load_bucket([(name, tensor.nan_to_num()) for name, tensor in bucket])  # type: ignore[misc]


# ------------------------------------------------------------------------------------------------------------ life


@caught_by("test_nothing_works_before_initialize")
class InitializesItself(GenerateFault):
    """loads its model when it is first asked"""

    def generate(self, batch: TensorDict, sampling: SamplingParams, *, min_version: int | None = None) -> TensorDict:
        if self._model is None:
            self.initialize()
        return super().generate(batch, sampling, min_version=min_version)


@caught_by("test_its_mesh_is_valid_before_initialize")
class LateMesh(RolloutFault):
    """has no mesh before initialize"""

    @property
    def mesh(self) -> Any:
        if self._model is None:
            raise Refused("no mesh yet")
        return super().mesh  # type: ignore[misc]


@caught_by("test_a_directory_without_a_whole_model_is_refused[a weight is missing]")
class FillsIn(RolloutFault):
    """leaves weights to chance that the checkpoint lacks"""

    def initialize(self) -> None:
        try:
            super().initialize()  # type: ignore[misc]
        except Refused as error:
            if "lm_head" not in str(error):
                raise


@caught_by("test_it_takes_no_requests")
class TakesRequests(RolloutFault):
    """takes requests that its manifest doesn't offer"""

    def submit(self, prompt_ids: Sequence[int], sampling: SamplingParams, **options: Any) -> Any:
        return iter(())


@caught_by("test_after_shutdown_nothing_works_and_no_process_is_left")
class LeavesProcess(RolloutFault):
    """leaves a process behind"""

    def initialize(self) -> None:
        super().initialize()  # type: ignore[misc]
        self._child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])


@entry_fault("takes a seed that its manifest doesn't offer", "test_a_seed_is_refused")
def hides_row_seeds(entry: Backend) -> Backend:
    return with_manifest(entry, capabilities=capabilities(entry) - {Capability.ROW_SEEDS})
