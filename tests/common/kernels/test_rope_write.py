"""RoPE + KV write against the reference: every slot of the cache is compared, written or not."""

import pytest
import torch

from common.kernels.rope_write import rope_and_write, rope_and_write_reference
from tests.common.kernels.cases import angles, projections
from tests.common.kernels.checks import GRIDS
from tests.common.kernels.pairwise import Case, case_id


@pytest.mark.parametrize("case", GRIDS["rope_and_write"].cases, ids=case_id)
def test_rope_and_write_matches_reference(case: Case) -> None:
    GRIDS["rope_and_write"].check(case, "cpu")


def test_negative_slot_writes_nothing() -> None:
    q, k, v = projections(5, 2, 1, 16, torch.float32, is_fused=False)
    slots = torch.tensor([20, -1, 21, -1, -1])
    cache = torch.full((2, 3, 16, 2, 16), -3.0)
    rotated = rope_and_write(q, k, v, angles(16), torch.arange(5), cache, slots)
    rows = cache.flatten(1, 2)
    written = (rows != -3.0).flatten(2).any(-1)
    assert written.nonzero().tolist() == [[0, 20], [0, 21], [1, 20], [1, 21]]
    torch.testing.assert_close(rotated, rope_and_write_reference(q, k, v, angles(16), torch.arange(5), cache, slots))
