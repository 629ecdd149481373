"""Penalties, bias and forbidden tokens on a row of logits."""

from typing import Any

import torch

from common.engine.contract.plan import SampleSpec
from common.engine.sampling.adjust import adjust, needs_adjustment
from common.values.request import SamplingParams

LOGITS = torch.tensor([1.0, -2.0, 3.0, 0.5, -0.5])


def spec(num_prompt_tokens: int = 0, token_ids: tuple[int, ...] = (), **fields: Any) -> SampleSpec:
    banned = fields.pop("banned", ())
    params = SamplingParams(seed=0, max_tokens=9, **fields)
    return SampleSpec(0, 0, params, num_prompt_tokens, token_ids, banned)


def close(row: torch.Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(row, torch.tensor(expected))


def test_a_plain_row_needs_nothing() -> None:
    assert not needs_adjustment(spec(temperature=0.3, top_k=3, top_p=0.5))
    for fields in (
        {"presence_penalty": 1.0},
        {"logit_bias": ((1, 1.0),)},
        {"banned": (3,)},
        {"allowed_token_ids": (1,)},
    ):
        assert needs_adjustment(spec(**fields))


def test_presence_and_frequency_count_the_output_only() -> None:
    row = adjust(LOGITS, spec(2, (0, 1, 2, 2, 3), presence_penalty=0.5, frequency_penalty=0.25))
    close(row, [1.0, -2.0, 3.0 - 0.5 - 2 * 0.25, 0.5 - 0.5 - 0.25, -0.5])


def test_negative_penalties_raise_what_was_said() -> None:
    close(adjust(LOGITS, spec(0, (0,), presence_penalty=-2.0)), [3.0, -2.0, 3.0, 0.5, -0.5])


def test_repetition_counts_prompt_and_output_once_and_works_on_both_signs() -> None:
    close(adjust(LOGITS, spec(1, (0, 1, 1, 1), repetition_penalty=2.0)), [0.5, -4.0, 3.0, 0.5, -0.5])


def test_penalties_of_an_empty_history_change_nothing() -> None:
    close(adjust(LOGITS, spec(repetition_penalty=2.0, presence_penalty=1.0)), LOGITS.tolist())


def test_bias_is_added_and_a_repeated_id_counts_twice() -> None:
    close(adjust(LOGITS, spec(logit_bias=((1, 5.0), (3, -100.0), (1, 1.0)))), [1.0, 4.0, 3.0, -99.5, -0.5])


def test_only_allowed_and_unbanned_tokens_stay() -> None:
    inf = float("inf")
    close(adjust(LOGITS, spec(allowed_token_ids=(0, 2, 4), banned=(2,))), [1.0, -inf, -inf, -inf, -0.5])


def test_the_given_row_is_left_as_it_was() -> None:
    before = LOGITS.clone()
    adjust(LOGITS, spec(0, (0,), presence_penalty=1.0, logit_bias=((1, 5.0),), banned=(0,)))
    assert torch.equal(LOGITS, before)
