"""Logprobs of prompts, from logits: against the definition."""

import pytest
import torch

from common.engine.contract.plan import ScoreSpec
from common.engine.sampling import SampleError
from common.engine.sampling.prompt_logprobs import prompt_logprobs
from common.values.request import PromptLogprobs

VOCAB_SIZE = 90


def scored(logits: torch.Tensor, token_ids: list[int], num_top: int) -> PromptLogprobs:
    result = prompt_logprobs(logits, ScoreSpec(5, tuple(token_ids), num_top))
    assert isinstance(result, PromptLogprobs)
    return result


@pytest.mark.parametrize("num_rows", [1, 31, 32, 33, 100])
@pytest.mark.parametrize("num_top", [0, 1, 7])
def test_logprobs_ranks_and_the_most_likely_are_those_of_the_whole_softmax(num_rows: int, num_top: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    logits = torch.randn(num_rows, VOCAB_SIZE, generator=generator) * 5
    token_ids = torch.randint(VOCAB_SIZE, (num_rows,), generator=generator).tolist()
    result, expected = scored(logits, token_ids, num_top), logits.double().log_softmax(1)
    assert (result.start, result.end) == (5, 5 + num_rows)
    for row, token_id in enumerate(token_ids):
        order = expected[row].argsort(descending=True).tolist()
        assert result.logprobs[row] == pytest.approx(expected[row, token_id].item(), abs=1e-5)
        assert result.ranks[row] == order.index(token_id) + 1
        top = result.top(5 + row)
        assert [each for each, _ in top] == order[:num_top]
        assert [logprob for _, logprob in top] == pytest.approx(expected[row, order[:num_top]].tolist(), abs=1e-5)


def test_logits_far_beyond_the_range_of_exp_are_scored() -> None:
    result = scored(torch.tensor([[1e4, 0.0, -1e4]]), [1], 1)
    assert result.logprobs == (-1e4,)
    assert result.top(5) == ((0, 0.0),)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_is_an_error_and_no_number(bad: float) -> None:
    logits = torch.zeros(40, VOCAB_SIZE)
    logits[39, 3] = bad
    assert prompt_logprobs(logits, ScoreSpec(1, (0,) * 40, 2)) == SampleError("logits are not finite")


def test_a_part_is_what_is_left_from_a_position_on() -> None:
    whole = PromptLogprobs(3, (-1.0, -2.0, -3.0), (1, 2, 3), (1, 2, 3, 4, 5, 6), (-0.1, -0.2, -0.3, -0.4, -0.5, -0.6))
    assert whole.after(3) == whole
    part = whole.after(4)
    assert (part.start, part.logprobs, part.ranks) == (4, (-2.0, -3.0), (2, 3))
    assert [part.top(position) for position in (4, 5)] == [whole.top(position) for position in (4, 5)]
