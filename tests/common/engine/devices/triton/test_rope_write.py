"""RoPE + KV write against the reference: every slot of the cache is compared, written or not."""

import pytest
import torch
import triton.language as tl

from common.engine.devices.triton.kv_layout import encoded, largest_of
from common.engine.devices.triton.launch import jit, launch
from common.engine.devices.triton.rope_write import rope_and_write, rope_and_write_reference
from common.engine.kv.attention_planes import read_rows
from common.engine.kv.quantized import LIMITS
from tests.common.engine.devices.triton.cases import Shape, angles, poisoned_cache, projections
from tests.common.engine.devices.triton.checks import GRIDS
from tests.common.engine.devices.triton.pairwise import Case, case_id


@pytest.mark.parametrize("case", GRIDS["rope_and_write"].cases, ids=case_id)
def test_rope_and_write_matches_reference(case: Case) -> None:
    GRIDS["rope_and_write"].check(case, "cpu")


def test_negative_slot_writes_nothing() -> None:
    q, k, v = projections(5, 2, 1, 16, torch.float32, is_fused=False)
    slots = torch.tensor([20, -1, 21, -1, -1])
    cache = torch.full((2, 3, 16, 2, 16), -3.0)
    layer = tuple(cache)
    rotated = rope_and_write(q, k, v, angles(16), torch.arange(5), layer, slots)
    rows = cache.flatten(1, 2)
    written = (rows != -3.0).flatten(2).any(-1)
    assert written.nonzero().tolist() == [[0, 20], [0, 21], [1, 20], [1, 21]]
    torch.testing.assert_close(rotated, rope_and_write_reference(q, k, v, angles(16), torch.arange(5), layer, slots))


@pytest.mark.parametrize("kind", (1, 2), ids=("int8", "fp8"))
def test_codes_are_those_of_torch_bit_for_bit(kind: int) -> None:
    """Rows whose largest value is the limit are not scaled, so codes show the rounding alone, ties included."""
    dtype = {1: torch.int8, 2: torch.float8_e4m3fn}[kind]
    limit = LIMITS[dtype]
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(64, 64, generator=generator) * 2.0 ** torch.randint(-9, 6, (64, 64), generator=generator)
    rows[:, 1::4] = (rows[:, 1::4] * 2).round() / 2  # ties of INT8
    rows = rows.clamp(-limit, limit)
    rows[:, 0] = limit
    codes = torch.zeros(64, 64, dtype=torch.uint8)
    launch(encode_kernel, (1,), codes.device, codes.view(torch.int8) if kind == 1 else codes, rows, KIND=kind)
    expected = (rows.round() if kind == 1 else rows).to(dtype)
    assert torch.equal(codes, expected.view(torch.uint8))


@jit
def encode_kernel(codes_ptr: tl.tensor, rows_ptr: tl.tensor, KIND: tl.constexpr) -> None:
    offsets = tl.arange(0, 64)[:, None] * 64 + tl.arange(0, 64)[None, :]
    rows = tl.load(rows_ptr + offsets)
    tl.store(codes_ptr + offsets, encoded(rows, largest_of(rows), KIND))


@pytest.mark.parametrize("kv_dtype", LIMITS, ids=str)
@pytest.mark.parametrize("bad", (float("nan"), float("inf")))
def test_what_is_not_finite_is_not_hidden_by_codes(kv_dtype: torch.dtype, bad: float) -> None:
    q, k, v = projections(3, 2, 1, 16, torch.float32, is_fused=False)
    k[1, 0, 3] = v[2, 1, 5] = bad
    cache = poisoned_cache(2, Shape(16, kv_dtype=kv_dtype))
    rope_and_write(q, k, v, angles(16), torch.arange(3), cache, torch.arange(3))
    key, value = read_rows(cache, torch.arange(3), torch.float32)
    assert not key[1, 0].isfinite().all()
    assert not value[2, 1].isfinite().all()
    assert key[0].isfinite().all()
    assert value[:2].isfinite().all()
