"""Sampling on the device gives the tokens of `common.engine.sampling`, and lets few of them leave the device."""

import itertools
from typing import Any

import pytest
import torch

from common.engine.contract.draws import DeviceDraws
from common.engine.contract.plan import SampleSpec
from common.engine.devices.triton.device_draws import TritonDraws
from common.engine.devices.triton.sampling import PART
from common.engine.sampling import SampleError, sample
from common.values.request import SampledToken, SamplingParams
from tests.common.engine.devices.triton.checks import GRIDS
from tests.common.engine.devices.triton.pairwise import Case, case_id

SAMPLING_KERNELS = ("row_best", "may_draw", "adjust_logits")
AXES: dict[str, tuple[Any, ...]] = {
    "temperature": (0.0, 0.3, 1.0, 1.7),
    "top_k": (0, 1, 7, 60),
    "top_p": (1.0, 0.9, 0.3),
    "min_p": (0.0, 0.05),
    "adjustments": (
        {},
        {"presence_penalty": 0.7, "frequency_penalty": -0.3},
        {"repetition_penalty": 1.3, "logit_bias": ((4, 3.0), (9, -2.5), (11, 0.1))},
        {"repetition_penalty": 0.8, "presence_penalty": 1.1, "frequency_penalty": 0.37, "banned": (0, 3)},
        {"allowed_token_ids": (2, 5, 6, 7, 40), "banned": (5,)},
    ),
}


def spec(position: int, banned: tuple[int, ...] = (), **fields: Any) -> SampleSpec:
    params = SamplingParams(**{"seed": 7 + position % 3, "max_tokens": 99} | fields)
    return SampleSpec(position % 2, position, params, 2, (3, 3, 9, 9, 9, 11, 3), banned)


def specs_of_all_kinds() -> list[SampleSpec]:
    """Every combination once."""
    combinations = [dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())]
    return [spec(idx, **(fields | fields.pop("adjustments"))) for idx, fields in enumerate(combinations)]


def logits_of(count: int, vocab_size: int, scale: float = 3.0) -> torch.Tensor:
    """In steps of 1/16, so that there are ties at every threshold."""
    logits = torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(1)) * scale
    return (logits * 16).round() / 16


@pytest.mark.parametrize("name", SAMPLING_KERNELS)
def test_kernels_match_their_references(name: str) -> None:
    for case in GRIDS[name].cases:
        GRIDS[name].check(case, "cpu")


@pytest.mark.parametrize("case", GRIDS["may_draw"].cases[:1], ids=case_id)
def test_a_wrong_floor_would_be_seen(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.common.engine.devices.triton import checks

    monkeypatch.setattr(checks, "may_draw_reference", lambda logits, rows, floors: logits[rows] > floors[:, None])
    with pytest.raises(AssertionError):
        for one in GRIDS["may_draw"].cases:
            checks.check_may_draw(one, "cpu")


@pytest.mark.parametrize("vocab_size", [50, 4200])
def test_every_kind_of_draw_gives_the_same_token(vocab_size: int) -> None:
    """480 specs. With 50 tokens there are fewer parts than top_k, so that nothing can be narrowed down by it."""
    specs = specs_of_all_kinds()
    logits = logits_of(len(specs), vocab_size)
    draws = TritonDraws()
    assert isinstance(draws, DeviceDraws)
    assert sample(logits, specs, draws) == sample(logits, specs)


def test_flat_logits_of_which_every_token_may_be_drawn() -> None:
    specs = [spec(idx, **fields) for idx, fields in enumerate(({}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.5}))]
    logits = torch.zeros(len(specs), 3000)
    assert sample(logits, specs, TritonDraws()) == sample(logits, specs)


def test_rows_that_are_not_finite_are_errors_of_their_own() -> None:
    specs = [spec(idx, top_k=3 * (idx % 2)) for idx in range(6)]
    logits = logits_of(6, 3000)
    logits[1, 7], logits[2, 2999], logits[4] = float("nan"), float("inf"), float("-inf")
    drawn = sample(logits, specs, TritonDraws())
    assert drawn == sample(logits, specs)
    assert [isinstance(token, SampleError) for token in drawn] == [False, True, True, False, True, False]


def test_a_row_whose_tokens_are_all_forbidden_is_an_error() -> None:
    only = spec(0, banned=(5,), allowed_token_ids=(5,), top_k=2)
    logits = logits_of(1, 300)
    drawn = sample(logits, [only], TritonDraws())
    assert drawn == sample(logits, [only])
    assert drawn == [SampleError("no token may be drawn")]


def test_logprobs_are_of_the_raw_logits() -> None:
    specs = [spec(0, temperature=0.0, presence_penalty=1.0, num_logprobs=3), spec(1, top_p=0.5, num_logprobs=0)]
    logits = logits_of(2, 700)
    ours, expected = (sample(logits, specs, draws) for draws in (TritonDraws(), None))
    assert ours == expected
    assert isinstance(ours[0], SampledToken)
    assert len(ours[0].top) == 3


def test_few_tokens_leave_the_device() -> None:
    """Of 20,000: a bell of logits 3 wide, as a model's are at its least sure."""
    logits = torch.randn(4, 20_000, generator=torch.Generator().manual_seed(2)) * 3
    specs = [spec(0, top_k=50), spec(1, min_p=0.05), spec(2, top_p=0.5), spec(3)]
    draws = TritonDraws()
    draws.best(logits)
    found = draws.filter_candidates(logits, range(3), specs)
    assert 50 <= len(found[0][0]) < 150
    assert len(found[1][0]) < 150
    assert len(found[2][0]) < 5000
    assert [total is not None for _, total in found] == [False, False, True]
    assert all((token_ids.diff() > 0).all() for token_ids, _ in found)


def test_top_k_of_more_tokens_than_parts_keeps_the_whole_row() -> None:
    draws, logits = TritonDraws(), logits_of(1, 5 * PART)
    draws.best(logits)
    ((token_ids, _),) = draws.filter_candidates(logits, [0], [spec(0, top_k=400)])
    assert len(token_ids) == 5 * PART


def test_filters_of_other_logits_than_asked_for_are_a_bug() -> None:
    draws, logits = TritonDraws(), logits_of(1, 300)
    draws.best(logits)
    with pytest.raises(AssertionError, match="best was not asked"):
        draws.filter_candidates(logits.clone(), [0], [spec(0, top_k=4)])
