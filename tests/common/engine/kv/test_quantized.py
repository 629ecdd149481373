"""INT8 and FP8: what comes back is within the stated bound, and the planes are what the kernels read."""

import pytest
import torch

from common.engine.kv.attention_planes import attention_planes, read_rows, write_rows
from common.engine.kv.cache import KVCache
from common.engine.kv.quantized import LIMITS, dequantize, quantize
from tests.caches import attention_spec, fill_bytes

KINDS = list(LIMITS)


def values(num_tokens: int = 40, num_kv_heads: int = 3, head_dim: int = 64) -> torch.Tensor:
    """Heads of very different magnitude, outliers among them."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(num_tokens, num_kv_heads, head_dim, generator=generator)
    return rows * 10.0 ** torch.randint(-4, 5, (num_tokens, num_kv_heads, 1), generator=generator)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_value_comes_back_within_the_stated_bound(kind: torch.dtype) -> None:
    rows = values()
    back = dequantize(*quantize(rows, kind))
    scale = rows.abs().amax(-1, keepdim=True) / LIMITS[kind]
    bound = scale / 2 if kind == torch.int8 else (rows.abs() / 16).maximum(scale / 1024)
    assert ((back - rows).abs() <= bound * 1.0001).all()
    assert not torch.equal(back, rows)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_largest_of_a_head_is_exact_and_zero_stays_zero(kind: torch.dtype) -> None:
    rows = values()
    rows[5, 1] = 0.0
    back = dequantize(*quantize(rows, kind))
    at = rows.abs().argmax(-1, keepdim=True)
    torch.testing.assert_close(back.gather(-1, at), rows.gather(-1, at), rtol=1e-6, atol=0)
    assert (back[5, 1] == 0).all()


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_not_hidden_and_stays_in_its_head(kind: torch.dtype, bad: float) -> None:
    rows = values()
    rows[2, 0, 7] = bad
    back = dequantize(*quantize(rows, kind))
    assert not back[2, 0, 7].isfinite()
    assert back[2, 1:].isfinite().all()
    assert back[3].isfinite().all()


def test_codes_have_their_scales_beside_them() -> None:
    rows = values(num_tokens=1)
    codes, scales = quantize(rows, torch.int8)
    assert codes.abs().max() == 127
    torch.testing.assert_close(scales, rows.abs().amax(-1) / 127)


@pytest.mark.parametrize("kind", [torch.bfloat16, *KINDS], ids=str)
def test_planes_are_rows_of_heads_that_ranks_may_split(kind: torch.dtype) -> None:
    planes = attention_planes(3, 64, kind)
    assert [plane.name for plane in planes] == ["k", "v"] + ["k_scale", "v_scale"] * (kind in LIMITS)
    assert [plane.num_shards for plane in planes] == [3] * len(planes)
    assert sum(plane.row_bytes for plane in planes) == 2 * 3 * (64 + 4 if kind in LIMITS else 128)


@pytest.mark.parametrize("head_dim", [8, 18])
def test_a_head_dim_that_would_not_be_aligned_is_refused(head_dim: int) -> None:
    with pytest.raises(ValueError, match=f"got {head_dim}"):
        attention_planes(2, head_dim, torch.int8)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_rows_written_to_slots_are_read_back_and_copied_with_their_scales(kind: torch.dtype) -> None:
    cache = KVCache(attention_spec(2, 3, 64, kind), (4,))
    assert cache.nbytes == 2 * 2 * 3 * (64 + 4) * 64
    fill_bytes(cache, 0xFF)  # NaN in every scale
    k, v = values(10), values(10).flip(0)
    slots = torch.arange(20, 30)
    write_rows(cache.layers[1], slots, k, v)
    cache.copy_blocks([(1, 3)])
    for shifted in (slots, slots + 32):
        got = read_rows(cache.layers[1], shifted, torch.float32)
        for rows, expected in zip(got, (k, v), strict=True):
            assert torch.equal(rows, dequantize(*quantize(expected, kind)))
    untouched = read_rows(cache.layers[1], torch.tensor([19, 30]), torch.float32)
    assert all(rows.isnan().all() for rows in untouched)
