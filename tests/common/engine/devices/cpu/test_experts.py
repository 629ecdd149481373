"""Experts with packed weights in one compiled call against one after another in torch."""

import pytest
import torch

from common.checkpoint.layers import Experts, Routing
from common.engine.contract.device import ExpertWeights, Linear, Mlp
from common.engine.contract.elementwise import TorchElementwise
from common.engine.contract.experts import TorchExperts
from common.engine.devices.cpu.device import CpuDevice
from common.engine.devices.cpu.native.experts import NativeExperts
from common.engine.devices.cpu.native.ops import NativeOps, native_ops
from common.values.config import Quantization

SPEC = Experts(Routing(num_experts=7, num_active=3), intermediate_size=64)
HIDDEN = 128
# Of the spread of the results: rounding to bfloat16 thrice; int8 and int4 codes of weights and rows besides.
BOUNDS: dict[Quantization, float] = {"none": 0.02, "int8": 0.03, "int4": 0.25}


@pytest.fixture(scope="module")
def ops() -> NativeOps:
    found = native_ops()
    if found is None or found.products is None:
        pytest.skip("no C++ compiler, or no AVX512-BF16")
    return found


def weights() -> list[ExpertWeights]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2 * SPEC.intermediate_size, HIDDEN), (HIDDEN, SPEC.intermediate_size))
    return [
        ExpertWeights(one.bfloat16(), other.bfloat16())
        for one, other in ((torch.randn(shape, generator=generator) / 8 for shape in shapes) for _ in range(7))
    ]


def rows(num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    scores, expert_ids = torch.randn((num_rows, 7), generator=generator).softmax(-1).topk(3)
    return torch.randn((num_rows, HIDDEN), generator=generator).bfloat16(), expert_ids, scores


@pytest.mark.parametrize("num_rows", [0, 1, 5, 300])
@pytest.mark.parametrize("quantization", BOUNDS)
def test_the_result_is_near_float32_and_depends_on_the_row_only(
    ops: NativeOps, quantization: Quantization, num_rows: int
) -> None:
    grouped = CpuDevice(torch.bfloat16, ops, quantization).grouped_mlp(SPEC, "silu", weights())
    assert isinstance(grouped.packed, NativeExperts)
    x, expert_ids, shares = rows(num_rows)
    exact = [Mlp(_linear(one.float()), _linear(other.float())) for one, other, *_ in weights()]
    expected = TorchExperts(exact, TorchElementwise().silu_mul)(x.float(), expert_ids, shares)
    torch.set_num_threads(2)
    found = grouped.apply(x, expert_ids, shares)
    torch.set_num_threads(1)
    assert torch.equal(grouped.apply(x, expert_ids, shares), found)
    assert torch.equal(grouped.apply(x[-1:], expert_ids[-1:], shares[-1:]), found[-1:])
    if num_rows:
        assert (found.float() - expected).abs().mean() < BOUNDS[quantization] * expected.std()


def test_experts_that_cannot_be_packed_are_computed_in_torch() -> None:
    device = CpuDevice(torch.float32, native_ops())
    grouped = device.grouped_mlp(
        SPEC, "silu", [ExpertWeights(one.float(), other.float()) for one, other, *_ in weights()]
    )
    assert grouped.packed is None
    assert isinstance(grouped.apply, TorchExperts)


def _linear(weight: torch.Tensor) -> Linear:
    return Linear(weight.shape[1], weight.shape[0], lambda x: x @ weight.T)
