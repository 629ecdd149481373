"""Whole draws: greedy, random, errors, logprobs, independence of company."""

import math
import random
from typing import Any

import pytest
import torch

from common.engine.contract.plan import SampleSpec
from common.engine.devices.cpu.native.ops import native_ops
from common.engine.sampling import SampleError, draw, sample
from common.values.request import SampledToken, SamplingParams

VOCAB_SIZE = 500


def spec(position: int = 0, choice_idx: int = 0, **fields: Any) -> SampleSpec:
    banned = fields.pop("banned", ())
    params = SamplingParams(**{"seed": 7, "max_tokens": 99} | fields)
    return SampleSpec(choice_idx, position, params, 0, (3, 3, 9), banned)


def rows(count: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(count, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * scale


def ids(drawn: list[SampledToken | SampleError]) -> list[int]:
    return [token.token_id for token in drawn if isinstance(token, SampledToken)]


def mixed_specs() -> list[SampleSpec]:
    """One of every kind of row."""
    return [
        spec(temperature=0.0),
        spec(position=1),
        spec(position=2, temperature=0.5, top_k=5),
        spec(position=3, top_p=0.8, num_logprobs=3),
        spec(position=4, min_p=0.1, logit_bias=((4, 3.0),)),
        spec(temperature=0.0, presence_penalty=2.0, num_logprobs=0),
        spec(choice_idx=3, seed=2**64 - 1, repetition_penalty=1.5),
        spec(allowed_token_ids=(5, 6, 7)),
    ]


@pytest.mark.parametrize("temperature", [0.0, 1e-6])
def test_temperature_zero_is_greedy(temperature: float) -> None:
    logits = rows(6)
    assert ids(sample(logits, [spec(temperature=temperature)] * 6)) == logits.argmax(-1).tolist()


def test_greedy_rows_draw_no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_noise(*_: object) -> torch.Tensor:
        raise AssertionError("noise for a greedy row")

    monkeypatch.setattr(draw, "gumbel", no_noise)
    sample(rows(2), [spec(temperature=0.0), spec(temperature=0.0, logit_bias=((1, 1.0),))])


def test_a_row_draws_the_same_alone_in_any_company_and_in_any_order() -> None:
    specs, logits = mixed_specs(), rows(8)
    together = sample(logits, specs)
    assert [sample(logits[row : row + 1], [specs[row]])[0] for row in range(8)] == together
    order = random.Random(5).sample(range(8), 8)
    assert sample(logits[order], [specs[row] for row in order]) == [together[row] for row in order]
    assert sample(logits, specs) == together


def test_seed_choice_and_position_each_give_another_stream() -> None:
    logits = rows(1).expand(40, -1)
    base = ids(sample(logits, [spec(position) for position in range(40)]))
    for other in ({"seed": 8}, {"choice_idx": 1}):
        assert ids(sample(logits, [spec(position, **other) for position in range(40)])) != base
    assert len(set(base)) > 5


def test_frequencies_follow_the_softmax_at_any_temperature() -> None:
    """A chi-square test over 4000 positions; 40 is beyond the 99.9th percentile of 15 degrees of freedom."""
    logits = torch.linspace(-1.5, 1.5, 16)
    for temperature in (0.5, 1.0, 1.7):
        drawn = ids(sample(logits.expand(4000, -1), [spec(p, temperature=temperature) for p in range(4000)]))
        counts = torch.bincount(torch.tensor(drawn), minlength=16)
        expected = (logits / temperature).softmax(0) * 4000
        assert ((counts - expected) ** 2 / expected).sum() < 40


@pytest.mark.parametrize(
    ("fields", "num_allowed"), [({"top_k": 3}, 3), ({"top_p": 0.5}, None), ({"min_p": 0.2}, None)], ids=str
)
def test_nothing_outside_the_filters_is_ever_drawn(fields: dict[str, Any], num_allowed: int | None) -> None:
    best = (rows(1)[0] / 1.5).softmax(0).sort(descending=True)
    if "top_p" in fields:
        num_allowed = int((best.values.cumsum(0) - best.values < 0.5).sum())
    elif "min_p" in fields:
        num_allowed = int((best.values >= 0.2 * best.values[0]).sum())
    logits = rows(1).expand(400, -1)
    drawn = set(ids(sample(logits, [spec(p, temperature=1.5, **fields) for p in range(400)])))
    assert drawn <= set(best.indices[:num_allowed].tolist())
    assert len(drawn) > 1


def test_only_allowed_tokens_are_drawn() -> None:
    drawn = ids(sample(rows(1).expand(50, -1), [spec(p, allowed_token_ids=(5, 9)) for p in range(50)]))
    assert set(drawn) == {5, 9}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_row_is_an_error_of_that_row_alone(bad: float) -> None:
    """One NaN or +inf spoils a row; -inf only when it is everywhere."""
    specs, logits = mixed_specs(), rows(8)
    expected = sample(logits, specs)
    poisoned = logits.clone()
    poisoned[3, slice(None) if bad == -math.inf else 123] = bad
    drawn = sample(poisoned, specs)
    assert drawn[3] == SampleError("logits are not finite")
    assert drawn[:3] + drawn[4:] == expected[:3] + expected[4:]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_may_draw_nothing_says_so(temperature: float) -> None:
    specs = [spec(temperature=temperature, allowed_token_ids=(4,), banned=(4,)), spec(temperature=0.0)]
    logits = rows(2)
    assert sample(logits, specs) == [SampleError("no token may be drawn"), SampledToken(int(logits[1].argmax()))]


@pytest.mark.parametrize("value", [3e38, -3e38, torch.finfo(torch.float32).min])
def test_a_row_whose_temperature_takes_it_beyond_float32_says_so(value: float) -> None:
    """Of any device: nothing is drawn from sums that are all infinite. Its best is still its best."""
    specs = [spec(temperature=0.5), spec(temperature=0.0), spec(temperature=4.0)]
    logits = torch.full((3, 1000), value)
    logits[:, 0] = -math.inf
    assert sample(logits, specs)[:2] == [SampleError("no token may be drawn"), SampledToken(1)]
    assert sample(logits, specs) == sample(logits, specs, native_ops())


def test_logprobs_are_of_the_raw_logits_best_first() -> None:
    logits = rows(1)
    specs = [spec(temperature=0.3, top_k=1, num_logprobs=4, logit_bias=((17, 100.0),))]
    (token,) = sample(logits, specs)
    assert isinstance(token, SampledToken)
    exact = logits[0].double().log_softmax(0)
    assert token.token_id == 17
    assert token.logprob == pytest.approx(float(exact[17]), abs=1e-4)
    assert [token_id for token_id, _ in token.top] == exact.topk(4).indices.tolist()
    assert [logprob for _, logprob in token.top] == pytest.approx(exact.topk(4).values.tolist(), abs=1e-4)


@pytest.mark.parametrize(("num_logprobs", "num_top"), [(None, 0), (0, 0), (1, 1), (20, 20), (9999, VOCAB_SIZE)])
def test_as_many_logprobs_come_back_as_were_asked_for(num_logprobs: int | None, num_top: int) -> None:
    (token, other) = sample(rows(2), [spec(num_logprobs=num_logprobs), spec(num_logprobs=2)])
    assert isinstance(token, SampledToken)
    assert isinstance(other, SampledToken)
    assert (token.logprob is None) == (num_logprobs is None)
    assert (len(token.top), len(other.top)) == (num_top, 2)


def test_the_greedy_token_leads_its_logprobs() -> None:
    for token in sample(rows(20), [spec(temperature=0.0, num_logprobs=2)] * 20):
        assert isinstance(token, SampledToken)
        assert token.top[0] == (token.token_id, token.logprob)


def test_extreme_but_valid_parameters_draw_a_token() -> None:
    extremes: list[dict[str, Any]] = [
        {"temperature": 2.0, "top_p": 1e-12},
        {"temperature": 1.1e-5},
        {"repetition_penalty": 1e-6},
        {"logit_bias": ((0, -100.0), (1, 100.0))},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0},
        {"top_k": 10**9, "min_p": 1.0},
    ]
    drawn = sample(rows(len(extremes)), [spec(**fields) for fields in extremes])
    assert all(isinstance(token, SampledToken) and 0 <= token.token_id < VOCAB_SIZE for token in drawn)


def test_logits_are_left_as_they_were() -> None:
    logits = rows(8)
    before = logits.clone()
    sample(logits, mixed_specs())
    assert torch.equal(logits, before)


def test_no_rows_draw_nothing() -> None:
    assert sample(torch.empty(0, VOCAB_SIZE), []) == []
