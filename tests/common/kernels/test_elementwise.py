"""Add + RMSNorm and SiLU x mul against their references."""

import pytest
import torch

from common.kernels.silu_mul import silu_mul
from tests.common.kernels.checks import GRIDS
from tests.common.kernels.pairwise import Case, case_id


@pytest.mark.parametrize("case", GRIDS["add_rms_norm"].cases, ids=case_id)
def test_add_rms_norm_matches_reference(case: Case) -> None:
    GRIDS["add_rms_norm"].check(case, "cpu")


@pytest.mark.parametrize("case", GRIDS["silu_mul"].cases, ids=case_id)
def test_silu_mul_matches_reference(case: Case) -> None:
    GRIDS["silu_mul"].check(case, "cpu")


def test_silu_mul_of_extreme_gates_is_finite() -> None:
    gate = torch.tensor([[-1e4, -200.0, -88.8, 0.0, 88.8, 1e4]])
    out = silu_mul(gate, torch.ones_like(gate))
    torch.testing.assert_close(out, gate.clamp(min=0), rtol=1e-6, atol=1e-30)
