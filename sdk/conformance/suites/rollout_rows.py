"""What rows come back of a rollout: greedy decoding, padding, stops, order, refusals of prompts."""

from __future__ import annotations

import attrs
import pytest
import torch
from tensordict import TensorDict

from core.batch import metadata, objects
from core.errors import Refused
from core.manifest import Capability
from core.rollout import Rollout
from sdk.conformance.suites.rollout_base import CONTEXT, EOS, RolloutSuite, greedy_error, prompts, responses, rows_of
from sdk.testing import characters

RAGGED = ([1, 5, 6, 9, 30], [7], [40, 41, 42])
MANY = [[3 + i, 3 + i * 7 % 61] for i in range(32)]


class RowSuite(RolloutSuite):
    def test_it_is_a_rollout_of_the_contract(self, rollout: Rollout) -> None:
        assert isinstance(rollout, Rollout)
        assert rollout.weight_version == 0

    def test_its_mesh_is_valid_before_initialize(self, rollout: Rollout) -> None:
        mesh = self.build(self.models.directory(1)).mesh
        assert (mesh.rank, mesh.dp_rank, mesh.dp_size, mesh.is_collect) == (0, 0, 1, True)
        assert mesh.layout == rollout.mesh.layout

    def test_greedy_rows_are_the_reference_models(self, rollout: Rollout) -> None:
        out = rollout.generate(prompts(*RAGGED), self.greedy(12))
        for row in rows_of(out):
            assert greedy_error(self.models.reference(1), row, self.log_prob_kind) < self.bounds.sampled

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_padded_prompts_give_what_jagged_ones_give(self, rollout: Rollout, side: str) -> None:
        width = max(map(len, RAGGED))
        ids, mask = torch.full((3, width), 63), torch.zeros(3, width, dtype=torch.bool)
        for i, row in enumerate(RAGGED):
            at = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
            ids[i, at], mask[i, at] = torch.tensor(row), True
        padded = TensorDict({"prompt_ids": ids, "attention_mask": mask}, batch_size=[3])
        have, want = (rollout.generate(batch, self.greedy(6)) for batch in (padded, prompts(*RAGGED)))
        assert [row.ids for row in rows_of(have)] == [row.ids for row in rows_of(want)]

    def test_rows_are_prompt_major_and_token_columns_are_aligned(self, rollout: Rollout) -> None:
        out = rollout.generate(
            prompts(*RAGGED, prompt_id=[70, 50, 60]), self.sampling(num_samples=3, max_new_tokens=4, **self.seed(0))
        )
        assert out.batch_size == (9,)
        assert out["prompt_id"].tolist() == [70] * 3 + [50] * 3 + [60] * 3
        assert out["weight_version"].tolist() == [0] * 9
        assert out["row_weight"].tolist() == [1.0] * 9
        assert out["rollout_log_probs"].dtype == torch.float32
        for i, row in enumerate(rows_of(out)):
            prompt = RAGGED[i // 3]
            assert row.prompt == prompt
            assert row.mask == [False] * len(prompt) + [True] * (len(row.ids) - len(prompt))
            assert bool((row.all_log_probs[: len(prompt)] == 0).all())
            assert bool((row.log_probs < 0).all())
        # Arithmetic between token columns works only where they share their offsets.
        assert (out["rollout_log_probs"] * out["response_mask"]).is_nested

    def test_rows_come_in_the_order_of_their_prompts_whichever_ends_first(self, rollout: Rollout) -> None:
        sampling = self.sampling(num_samples=2, max_new_tokens=60, **self.seed(4))
        out = rollout.generate(prompts(*MANY[:8], prompt_id=range(80, 0, -10)), sampling)
        assert out["prompt_id"].tolist() == [i for i in range(80, 0, -10) for _ in range(2)]
        rows = rows_of(out)
        assert [row.prompt for row in rows] == [prompt for prompt in MANY[:8] for _ in range(2)]
        ends = [len(row.tokens) for row in rows]
        assert ends != sorted(ends)
        assert ends != sorted(ends, reverse=True)

    def test_model_inputs_that_it_does_not_read_are_refused_by_name(self, rollout: Rollout) -> None:
        batch = prompts([5], [6]).set("inputs/strange_pixels", torch.zeros(2, 3))
        with pytest.raises(Refused, match="inputs/strange_pixels"):
            rollout.generate(batch, self.greedy(1))

    def test_metadata_say_temperature_and_kind_of_log_probs(self, rollout: Rollout) -> None:
        out = rollout.generate(prompts([5]), self.sampling(temperature=0.7, max_new_tokens=1))
        assert metadata(out, "rollout_temperature") == 0.7
        assert metadata(out, "log_prob_kind") == self.log_prob_kind.value
        assert metadata(rollout.generate(prompts([5]), self.greedy(1)), "rollout_temperature") == 1.0

    def test_filler_prompts_give_filler_rows(self, rollout: Rollout) -> None:
        batch = prompts([5], [6]).set("row_weight", torch.tensor([1.0, 0.0]))
        out = rollout.generate(batch, self.sampling(num_samples=2, max_new_tokens=1))
        assert out["row_weight"].tolist() == [1, 1, 0, 0]

    def test_no_prompts_give_an_empty_batch_with_all_columns(self, rollout: Rollout) -> None:
        empty = TensorDict({"prompt_ids": torch.zeros(0, 4, dtype=torch.int64)}, batch_size=[0])
        out, full = (rollout.generate(batch, self.sampling(max_new_tokens=1)) for batch in (empty, prompts([5])))
        assert out.batch_size == (0,)
        assert set(out.keys()) == set(full.keys())

    def test_the_eos_ends_a_row_and_belongs_to_the_response(self, rollout: Rollout) -> None:
        sampling = self.sampling(num_samples=128, max_new_tokens=24, **self.seed(0))
        out = rollout.generate(prompts([5, 6]), sampling)
        reasons = objects(out.get("finish_reason"))
        assert set(reasons) == {"stop", "length"}
        for response, reason in zip(responses(out), reasons, strict=True):
            assert EOS not in response[:-1]
            assert (response[-1] == EOS) == (reason == "stop")
            assert len(response) == 24 or reason == "stop"

    def test_ignore_eos_samples_the_same_and_goes_on(self, rollout: Rollout) -> None:
        base = self.greedy(24)
        if self.offers(Capability.ROW_SEEDS):
            base = self.sampling(num_samples=2, max_new_tokens=24, seed=0)
        stopped = responses(rollout.generate(prompts(*MANY), base))
        out = rollout.generate(prompts(*MANY), attrs.evolve(base, ignore_eos=True))
        assert set(objects(out.get("finish_reason"))) == {"length"}
        pairs = list(zip(responses(out), stopped, strict=True))
        assert any(EOS in long for long, _ in pairs)
        assert all(len(long) == 24 and long[: len(short)] == short for long, short in pairs)

    def test_a_stop_token_ends_a_row_and_belongs_to_the_response(self, rollout: Rollout) -> None:
        [free] = responses(rollout.generate(prompts([5, 6]), self.greedy()))
        stop = free[3]
        out = rollout.generate(prompts([5, 6]), self.greedy(stop_token_ids=(stop,), ignore_eos=True))
        assert responses(out) == [free[: free.index(stop) + 1]]
        assert objects(out.get("finish_reason")) == ["stop"]

    def test_min_new_tokens_holds_every_stop_back(self, rollout: Rollout) -> None:
        [free] = responses(rollout.generate(prompts([5, 6]), self.greedy()))
        sampling = self.greedy(stop_token_ids=(free[0],), min_new_tokens=3)
        [response] = responses(rollout.generate(prompts([5, 6]), sampling))
        assert not {free[0], EOS} & set(response[:3])
        assert len(response) > 3

    def test_each_row_ends_at_its_first_stop_token_or_whole_stop_string(self, rollout: Rollout) -> None:
        free = responses(rollout.generate(prompts(*MANY), self.greedy(12, ignore_eos=True)))
        # Special tokens have names of several characters.
        a, b, c = [row for row in free if min(row) > EOS and len(set(row[:6])) > 3][:3]
        token, stops = c[2], (characters(a[4:6]), characters(b[2:5]))
        out = rollout.generate(prompts(*MANY), self.greedy(10, ignore_eos=True, stop=stops, stop_token_ids=(token,)))
        reasons = objects(out.get("finish_reason"))
        for whole, response, reason in zip(free, responses(out), reasons, strict=True):
            text = characters(whole)
            ends = [text.find(stop) + len(stop) for stop in (*stops, characters([token])) if stop in text]
            end = min([*ends, 11])
            assert response == whole[: min(end, 10)]
            assert reason == ("stop" if end <= 10 else "length")
        assert set(reasons) == {"stop", "length"}

    def test_a_prompts_last_characters_are_no_part_of_a_stop_string(self, rollout: Rollout) -> None:
        [free] = responses(rollout.generate(prompts([5, 6]), self.greedy()))
        across = characters([6, free[0]])
        out = rollout.generate(prompts([5, 6]), self.greedy(stop=(across,)))
        assert across not in characters(free)
        assert responses(out) == [free]

    def test_a_prompt_may_fill_the_context_and_a_longer_one_is_refused_with_the_limit(self, rollout: Rollout) -> None:
        for length, max_new_tokens in ((CONTEXT - 1, 1), (CONTEXT - 6, 6)):
            [row] = rows_of(
                rollout.generate(prompts(self.models.long(length)), self.greedy(max_new_tokens, ignore_eos=True))
            )
            assert len(row.ids) == CONTEXT
            assert greedy_error(self.models.reference(1), row, self.log_prob_kind) < self.bounds.sampled
        with pytest.raises(Refused, match=str(CONTEXT)):
            rollout.generate(prompts([5], self.models.long(CONTEXT - 6)), self.greedy(7))

    @pytest.mark.parametrize("fault", ["foreign token", "negative token", "no column", "empty prompt"])
    def test_prompts_that_cannot_be_are_refused(self, rollout: Rollout, fault: str) -> None:
        masked = {"prompt_ids": torch.ones(2, 2, dtype=torch.int64), "attention_mask": torch.tensor([[1, 1], [0, 0]])}
        batch = {
            "foreign token": prompts([5], [6, 64]),
            "negative token": prompts([5], [6, -1]),
            "no column": TensorDict({"input_ids": torch.ones(1, 2)}, batch_size=[1]),
            "empty prompt": TensorDict(masked, batch_size=[2]),
        }[fault]
        with pytest.raises(Refused):
            rollout.generate(batch, self.greedy())

    def test_stops_that_cannot_be_are_refused(self, rollout: Rollout) -> None:
        with pytest.raises(Refused, match="64"):
            rollout.generate(prompts([5]), self.greedy(stop_token_ids=(64,)))
        with pytest.raises(Refused):
            rollout.generate(prompts([5]), self.greedy(stop=("",)))
