"""Gathers and scatters of rows move bits, whatever they mean, and touch nothing else."""

import pytest
import torch

from common.engine.devices.triton.chunk import gather_rows, scatter_rows
from tests.common.engine.devices.triton.checks import GRIDS, copy_inputs
from tests.common.engine.devices.triton.pairwise import Case, case_id

CASE: Case = {"num_tokens": 20, "num_layers": 2, "shard_bytes": 24, "shards": range(1, 3)}
COLUMNS = slice(24, 72)


@pytest.mark.parametrize("case", GRIDS["gather_rows"].cases, ids=case_id)
def test_gather_matches_reference_bit_for_bit(case: Case) -> None:
    GRIDS["gather_rows"].check(case, "cpu")


@pytest.mark.parametrize("case", GRIDS["scatter_rows"].cases, ids=case_id)
def test_scatter_matches_reference_bit_for_bit(case: Case) -> None:
    GRIDS["scatter_rows"].check(case, "cpu")


def test_a_scatter_touches_only_the_rows_and_columns_named() -> None:
    plane, slots, part = copy_inputs(CASE)
    before = plane.clone()
    scatter_rows(plane, slots, COLUMNS, part)
    untouched = torch.ones(64, dtype=torch.bool)
    untouched[slots] = False
    assert torch.equal(plane[:, untouched], before[:, untouched])
    assert torch.equal(plane[:, :, :24], before[:, :, :24])
    back = torch.zeros_like(part)
    gather_rows(plane, slots, COLUMNS, back)
    assert torch.equal(back, part)


def test_a_part_may_lie_in_a_staging_buffer_behind_a_header() -> None:
    plane, slots, part = copy_inputs(CASE)
    staging = torch.zeros(48 + part.numel(), dtype=torch.uint8)
    gather_rows(plane, slots, COLUMNS, staging[48:].view(part.shape))
    assert torch.equal(staging[48:].view(part.shape), plane[:, slots, COLUMNS])
    assert (staging[:48] == 0).all()


def test_a_part_of_another_shape_or_bytes_that_are_no_words_are_refused() -> None:
    plane, slots, part = copy_inputs(CASE)
    with pytest.raises(AssertionError):
        gather_rows(plane[:1], slots, COLUMNS, part)
    with pytest.raises(AssertionError):
        scatter_rows(plane, slots[:-1], COLUMNS, part)
    with pytest.raises(AssertionError):
        gather_rows(plane, slots, slice(23, 71), part)
