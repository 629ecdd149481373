"""Prepacked products equal plain ones."""

import pytest
import torch

from common.engine.devices.cpu import linear
from common.engine.devices.cpu.linear import cpu_linear

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3, 32, 130])
def test_the_product_is_right_for_any_number_of_rows(num_rows: int, has_bias: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    x, weight = (torch.randn(n, 48, generator=generator).to(dtype) for n in (num_rows, 80))
    bias = torch.randn(80, generator=generator).to(dtype) if has_bias else None
    expected = x.double() @ weight.double().T + (bias.double() if bias is not None else 0)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(cpu_linear(weight, bias, None)(x).double(), expected, atol=tolerance * 7, rtol=tolerance)


def test_without_packing_the_product_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(4, 16), torch.randn(8, 16)
    packed = cpu_linear(weight, None, None)(x)
    monkeypatch.setattr(linear, "_can_pack", lambda dtype: False)
    torch.testing.assert_close(cpu_linear(weight, None, None)(x), packed)


def test_a_processor_that_packs_only_float32_serves_bfloat16_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch does without AVX-512."""
    real = torch.ops.mkldnn._reorder_linear_weight

    def reorder(weight: torch.Tensor, num_rows: int) -> torch.Tensor:
        if weight.dtype != torch.float32:
            raise RuntimeError("bf16 path needs the cpu support avx_ne_convert or avx512bw, avx512vl and avx512dq")
        return real(weight, num_rows)

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", reorder)
    x, weight = torch.eye(16, dtype=torch.bfloat16), torch.randn(8, 16).bfloat16()
    assert torch.equal(cpu_linear(weight, None, None)(x), weight.T)


def test_a_view_of_a_larger_matrix_is_taken_as_input() -> None:
    x, weight = torch.randn(6, 40), torch.randn(8, 16)
    torch.testing.assert_close(cpu_linear(weight, None, None)(x[:, 10:26]), x[:, 10:26] @ weight.T)
