"""Our own bfloat16 products against float64, and that a row's result depends on nothing but the row."""

from collections.abc import Iterator

import pytest
import torch

from common.checkpoint import CheckpointError
from common.engine.devices.cpu.linear import cpu_linear
from common.engine.devices.cpu.native.ops import native_ops
from common.engine.devices.cpu.native.products import NativeProducts
from common.engine.kv.pages import HugeArena, advise_huge_pages

SHAPES = [(1, 2), (15, 64), (48, 576), (49, 34), (96, 130), (100, 1536)]


@pytest.fixture(scope="module")
def products() -> NativeProducts:
    ops = native_ops()
    if ops is None or ops.products is None:
        pytest.skip("no C++ compiler, or no AVX512-BF16")
    return ops.products


@pytest.fixture(params=[1, 2], ids=["1-thread", "2-threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def inputs(num_rows: int, shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    sizes = ((num_rows, shape[1]), shape, (shape[0],))
    x, weight, bias = (torch.randn(size, generator=generator).bfloat16() for size in sizes)
    return x, weight, bias


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 7, 8, 9, 17, 130, 257])
def test_products_are_those_of_float64_rounded_once(
    products: NativeProducts, threads: None, num_rows: int, shape: tuple[int, int], has_bias: bool
) -> None:
    x, weight, bias = inputs(num_rows, shape)
    expected = x.double() @ weight.double().T + (bias.double() if has_bias else 0)
    product = products.pack(weight, bias if has_bias else None)
    torch.testing.assert_close(product(x).double(), expected, atol=2e-5 * shape[1], rtol=2**-8)


def test_a_row_has_the_same_result_whatever_stands_beside_it(products: NativeProducts) -> None:
    x, weight, _ = inputs(130, (100, 576))
    product = products.pack(weight, None)
    together = product(x)
    for row in (0, 7, 8, 64, 127, 128, 129):
        assert torch.equal(product(x[row : row + 1])[0], together[row])


def test_what_lies_behind_the_weights_never_reaches_a_result(products: NativeProducts) -> None:
    """The last group of outputs is padded: outputs beside it must stay as they were."""
    x, weight, _ = inputs(3, (50, 64))
    weight[49] = torch.nan
    out = products.pack(weight, None)(x)
    assert out.shape == (3, 50)
    assert out[:, 49].isnan().all()
    assert out[:, :49].isfinite().all()


def test_no_rows_give_no_rows(products: NativeProducts) -> None:
    _, weight, _ = inputs(1, (50, 64))
    assert products.pack(weight, None)(torch.empty((0, 64), dtype=torch.bfloat16)).shape == (0, 50)


def test_a_linear_layer_uses_them_for_bfloat16_with_an_even_number_of_inputs_only(products: NativeProducts) -> None:
    assert cpu_linear(torch.ones(8, 4).bfloat16(), None, products).packed is not None
    assert cpu_linear(torch.ones(8, 3).bfloat16(), None, products).packed is None
    assert cpu_linear(torch.ones(8, 4), None, products).packed is None


def test_pieces_of_an_arena_do_not_overlap_and_are_aligned() -> None:
    arena = HugeArena(piece_bytes=1000)
    pieces = [arena.take(size) for size in (1, 64, 65, 3000, 900)]
    for idx, piece in enumerate(pieces):
        piece.fill_(idx)
    for idx, (piece, size) in enumerate(zip(pieces, (1, 64, 65, 3000, 900), strict=True)):
        assert piece.tolist() == [idx] * size
    starts = [piece.data_ptr() % 64 for piece in pieces[:3]]
    assert starts == [starts[0]] * 3


def test_advice_leaves_a_tensor_as_it_is() -> None:
    for size in (0, 10, 9 << 20):
        tensor = torch.zeros(size, dtype=torch.uint8)
        advise_huge_pages(tensor)
        assert int(tensor.sum()) == 0


# relative error of a product of normal numbers: rounding to 8 bits is 0.4 % of the greatest in a span, to 4 bits 7 %
MAX_ERROR = {8: 0.012, 4: 0.11}


@pytest.mark.parametrize("bits", MAX_ERROR)
@pytest.mark.parametrize("shape", [(1, 64), (47, 128), (100, 576)], ids=str)
@pytest.mark.parametrize("num_rows", [1, 3, 4, 5, 130])
def test_quantized_products_are_near_and_a_rows_result_its_own(
    products: NativeProducts, threads: None, num_rows: int, shape: tuple[int, int], bits: int
) -> None:
    x, weight, bias = inputs(num_rows, shape)
    product = products.with_bits(bits).pack(weight, bias)
    expected = x.double() @ weight.double().T
    error = product(x).double() - bias.double() - expected
    typical = x.double().norm(dim=1, keepdim=True) * weight.double().norm(dim=1)  # of a product, by its factors
    assert error.norm() <= MAX_ERROR[bits] * typical.norm() / shape[1] ** 0.5 * 1.5
    assert torch.equal(product(x[-1:])[0], product(x)[-1])


@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_products_are_those_of_the_quantized_numbers(products: NativeProducts, bits: int) -> None:
    """Weights and activations that the bits hold exactly: then nothing is lost but the last rounding."""
    generator = torch.Generator().manual_seed(bits)
    least, most = (-127, 127) if bits == 8 else (-7, 8)
    weight = torch.randint(least, most + 1, (70, 192), generator=generator).double()
    x = torch.randint(-127, 128, (5, 192), generator=generator).double()
    weight[:, ::32], weight[:, 1::32], x[:, ::32] = least, most, -127  # every span spans the range: all scales are 1
    found = products.with_bits(bits).pack(weight.bfloat16(), None)(x.bfloat16())
    torch.testing.assert_close(found.double(), x @ weight.T, rtol=2**-8, atol=1e-3)


def test_outliers_and_zeros_of_one_span_leave_others_alone(products: NativeProducts) -> None:
    x, weight, _ = inputs(2, (48, 192))
    x[0, :64], x[0, 64:128] = 0, x[0, 64:128] * 1000
    weight[3] = 0
    out = products.with_bits(8).pack(weight, None)(x)
    assert torch.equal(out[:, 3], torch.zeros(2).bfloat16())
    expected = x[0].double() @ weight.double().T
    assert (out[0].double() - expected).norm() < 0.02 * expected.norm()


def test_a_weight_that_cannot_have_so_few_bits_is_refused(products: NativeProducts) -> None:
    with pytest.raises(CheckpointError, match="cannot have 4 bits"):
        cpu_linear(torch.ones(8, 96).bfloat16(), None, products.with_bits(4))


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("at", [0, 1, 63, 64, 191])
def test_what_is_not_finite_never_becomes_a_number(products: NativeProducts, bits: int, value: float, at: int) -> None:
    """Damaged weights and activations must reach the check of the logits, whatever the number of bits."""
    x, weight, _ = inputs(3, (50, 192))
    damaged_x, damaged_weight = x.clone(), weight.clone()
    damaged_x[1, at], damaged_weight[2, at] = value, value
    out = products.with_bits(bits).pack(weight, None)(damaged_x)
    assert not out[1].isfinite().any()
    assert out[[0, 2]].isfinite().all()
    out = products.with_bits(bits).pack(damaged_weight, None)(x)
    assert not out[:, 2].isfinite().any()
    assert out[:, [*range(2), *range(3, 50)]].isfinite().all()
