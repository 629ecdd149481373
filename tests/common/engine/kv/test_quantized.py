"""Rows of INT8 and FP8: what comes back is within the stated bound, and the layout is what the kernels read."""

import pytest
import torch

from common.engine.kv.cache import KVCache, KVShape
from common.engine.kv.quantized import LIMITS, dequantize, num_kv_heads_of, quantize, row_bytes
from common.engine.kv.rows import read_rows, write_rows

KINDS = list(LIMITS)


def values(num_tokens: int = 40, num_kv_heads: int = 3, head_dim: int = 64) -> torch.Tensor:
    """Heads of very different magnitude, outliers among them."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(num_tokens, num_kv_heads, head_dim, generator=generator)
    return rows * 10.0 ** torch.randint(-4, 5, (num_tokens, num_kv_heads, 1), generator=generator)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_value_comes_back_within_the_stated_bound(kind: torch.dtype) -> None:
    rows = values()
    back = dequantize(quantize(rows, kind), kind, 3, 64)
    scale = rows.abs().amax(-1, keepdim=True) / LIMITS[kind]
    bound = scale / 2 if kind == torch.int8 else (rows.abs() / 16).maximum(scale / 1024)
    assert ((back - rows).abs() <= bound * 1.0001).all()
    assert not torch.equal(back, rows)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_largest_of_a_head_is_exact_and_zero_stays_zero(kind: torch.dtype) -> None:
    rows = values()
    rows[5, 1] = 0.0
    back = dequantize(quantize(rows, kind), kind, 3, 64)
    at = rows.abs().argmax(-1, keepdim=True)
    torch.testing.assert_close(back.gather(-1, at), rows.gather(-1, at), rtol=1e-6, atol=0)
    assert (back[5, 1] == 0).all()


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_not_hidden_and_stays_in_its_head(kind: torch.dtype, bad: float) -> None:
    rows = values()
    rows[2, 0, 7] = bad
    back = dequantize(quantize(rows, kind), kind, 3, 64)
    assert not back[2, 0, 7].isfinite()
    assert back[2, 1:].isfinite().all()
    assert back[3].isfinite().all()


def test_a_row_is_codes_then_scales_then_nothing() -> None:
    rows = values(num_tokens=1)
    stored = quantize(rows, torch.int8)[0]
    assert stored.shape == (row_bytes(3, 64),) == (208,)
    assert stored[: 3 * 64].view(torch.int8).abs().max() == 127
    torch.testing.assert_close(stored[192:204].view(torch.float32), rows[0].abs().amax(-1) / 127)
    assert (stored[204:] == 0).all()


@pytest.mark.parametrize("heads", [(1, 16), (3, 64), (8, 128), (5, 80), (2, 96), (1, 256)], ids=str)
def test_rows_are_aligned_and_tell_their_number_of_heads(heads: tuple[int, int]) -> None:
    num_kv_heads, head_dim = heads
    assert row_bytes(*heads) % 16 == 0
    kv = torch.zeros(2, 1, 1, 1, row_bytes(*heads), dtype=torch.int8)
    assert num_kv_heads_of(kv, head_dim) == num_kv_heads
    assert num_kv_heads_of(torch.zeros(2, 1, 1, *heads), head_dim) == num_kv_heads


@pytest.mark.parametrize("head_dim", [8, 18])
def test_a_head_dim_that_would_not_be_aligned_is_refused(head_dim: int) -> None:
    with pytest.raises(ValueError, match=f"got {head_dim}"):
        row_bytes(2, head_dim)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_rows_written_to_slots_are_read_back_and_copied_with_their_scales(kind: torch.dtype) -> None:
    shape = KVShape(num_layers=2, num_kv_heads=3, head_dim=64, dtype=kind)
    cache = KVCache(shape, num_blocks=4, block_size=16)
    assert cache.data.nbytes == shape.bytes_per_token * cache.num_slots == 2 * 2 * 208 * 64
    cache.data.view(torch.uint8).fill_(0xFF)  # NaN in every scale
    k, v = values(10), values(10).flip(0)
    slots = torch.arange(20, 30)
    write_rows(cache.layers[1], slots, k, v)
    cache.copy_blocks([(1, 3)])
    for shifted in (slots, slots + 32):
        got = read_rows(cache.layers[1], shifted, 64, torch.float32)
        for rows, expected in zip(got, (k, v), strict=True):
            assert torch.equal(rows, dequantize(quantize(expected, kind), kind, 3, 64))
    untouched = read_rows(cache.layers[1], torch.tensor([19, 30]), 64, torch.float32)
    assert all(rows.isnan().all() for rows in untouched)
