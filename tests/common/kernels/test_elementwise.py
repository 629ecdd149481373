"""Add + RMSNorm and SiLU x mul against their references."""

from typing import Any

import pytest
import torch

from common.kernels.norm import add_rms_norm, add_rms_norm_reference
from common.kernels.silu_mul import silu_mul, silu_mul_reference
from tests.common.kernels.cases import ROUNDING_BOUND
from tests.common.kernels.pairwise import case_id, pairwise

CASES = pairwise(
    {
        "num_tokens": (0, 1, 3, 17),
        "size": (1, 16, 96, 576, 1000, 1536, 2049),
        "dtype": (torch.float32, torch.bfloat16, torch.float16),
        "is_sliced": (False, True),
    }
)


def pair(case: dict[str, Any], scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Two [num_tokens, size] tensors: halves of one fused projection, or tensors of their own."""
    generator = torch.Generator().manual_seed(0)
    fused = (scale * torch.randn(case["num_tokens"], 2 * case["size"], generator=generator)).to(case["dtype"])
    left, right = fused.chunk(2, dim=1)
    return (left, right) if case["is_sliced"] else (left.contiguous(), right.contiguous())


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_add_rms_norm_matches_reference(case: dict[str, Any]) -> None:
    x, residual = pair(case, 1.0)
    weight = torch.linspace(0.5, 1.5, case["size"]).to(case["dtype"])
    out, total = add_rms_norm(x, residual, weight, 1e-5)
    expected_out, expected_total = add_rms_norm_reference(x, residual, weight, 1e-5)
    # two roundings lie between inputs and output
    bound = 2 * ROUNDING_BOUND[case["dtype"]]
    torch.testing.assert_close(total, expected_total, rtol=bound, atol=0)
    torch.testing.assert_close(out, expected_out, rtol=bound, atol=bound)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_silu_mul_matches_reference(case: dict[str, Any]) -> None:
    gate, up = pair(case, 4.0)
    bound = 2 * ROUNDING_BOUND[case["dtype"]]
    torch.testing.assert_close(silu_mul(gate, up), silu_mul_reference(gate, up), rtol=bound, atol=1e-6)


def test_silu_mul_of_extreme_gates_is_finite() -> None:
    gate = torch.tensor([[-1e4, -200.0, -88.8, 0.0, 88.8, 1e4]])
    out = silu_mul(gate, torch.ones_like(gate))
    torch.testing.assert_close(out, gate.clamp(min=0), rtol=1e-6, atol=1e-30)
