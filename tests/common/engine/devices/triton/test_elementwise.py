"""Add + RMSNorm and SiLU x mul against their references."""

import pytest
import torch

from common.engine.contract.elementwise import Elementwise, TorchElementwise
from common.engine.devices.triton.elementwise import TritonElementwise
from common.engine.devices.triton.silu_mul import silu_mul
from tests.common.engine.devices.triton.checks import GRIDS
from tests.common.engine.devices.triton.pairwise import Case, case_id


@pytest.mark.parametrize("case", GRIDS["add_rms_norm"].cases, ids=case_id)
def test_add_rms_norm_matches_reference(case: Case) -> None:
    GRIDS["add_rms_norm"].check(case, "cpu")


@pytest.mark.parametrize("case", GRIDS["rms_norm"].cases, ids=case_id)
def test_rms_norm_matches_reference(case: Case) -> None:
    GRIDS["rms_norm"].check(case, "cpu")


def test_what_a_model_needs_is_what_torch_gives() -> None:
    """The kernels behind `Elementwise`, for a layer's rows and for the heads of a fused projection."""
    generator = torch.Generator().manual_seed(0)
    x, residual, gate_up = (torch.randn(5, size, generator=generator) for size in (96, 96, 64))
    weight, heads = torch.rand(96, generator=generator), torch.randn(5, 6, 96, generator=generator)[:, :4]
    ours: Elementwise = TritonElementwise()
    expected = TorchElementwise()
    torch.testing.assert_close(ours.rms_norm(heads, weight, 1e-5), expected.rms_norm(heads, weight, 1e-5))
    torch.testing.assert_close(
        ours.add_rms_norm(x, residual, weight, 1e-5), expected.add_rms_norm(x, residual, weight, 1e-5)
    )
    torch.testing.assert_close(ours.silu_mul(gate_up), expected.silu_mul(gate_up))


@pytest.mark.parametrize("case", GRIDS["silu_mul"].cases, ids=case_id)
def test_silu_mul_matches_reference(case: Case) -> None:
    GRIDS["silu_mul"].check(case, "cpu")


def test_silu_mul_of_extreme_gates_is_finite() -> None:
    gate = torch.tensor([[-1e4, -200.0, -88.8, 0.0, 88.8, 1e4]])
    out = silu_mul(gate, torch.ones_like(gate))
    torch.testing.assert_close(out, gate.clamp(min=0), rtol=1e-6, atol=1e-30)
