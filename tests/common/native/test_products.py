"""Our own bfloat16 products against float64, and that a row's result depends on nothing but the row."""

from collections.abc import Iterator

import pytest
import torch

from common.model.linear import Linear
from common.native.huge_pages import HugeArena, advise_huge_pages
from common.native.ops import native_ops
from common.native.products import NativeProducts

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
    assert Linear(torch.ones(8, 4).bfloat16(), None, products).product is not None
    assert Linear(torch.ones(8, 3).bfloat16(), None, products).product is None
    assert Linear(torch.ones(8, 4), None, products).product is None


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
