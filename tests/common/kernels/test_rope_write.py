"""RoPE + KV write against the reference: every slot of the cache is compared, written or not."""

from typing import Any

import pytest
import torch

from common.kernels.rope_write import rope_and_write, rope_and_write_reference
from tests.common.kernels.cases import ROUNDING_BOUND
from tests.common.kernels.pairwise import case_id, pairwise

NUM_SLOTS = 9 * 16


def projections(
    num_tokens: int, num_kv_heads: int, group: int, head_dim: int, dtype: torch.dtype, *, is_fused: bool
) -> list[torch.Tensor]:
    """q, k, v: slices of one fused projection, or tensors of their own."""
    generator = torch.Generator().manual_seed(num_tokens)
    sizes = [num_kv_heads * group * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
    fused = (2.0 * torch.rand(num_tokens, sum(sizes), generator=generator) - 1.0).to(dtype)
    parts = [x if is_fused else x.contiguous() for x in fused.split(sizes, dim=1)]
    return [x.view(num_tokens, x.shape[1] // head_dim, head_dim) for x in parts]


def angles(head_dim: int) -> torch.Tensor:
    """[200, head_dim]: cos in the first half, sin in the second."""
    angle = torch.arange(200)[:, None] / 10000 ** (torch.arange(0, head_dim, 2) / head_dim)
    return torch.cat((angle.cos(), angle.sin()), dim=1)


CASES = pairwise(
    {
        "num_tokens": (0, 1, 7, 8, 9, 33),
        "num_kv_heads": (1, 2, 3),
        "group": (1, 2, 3, 5, 8),
        "head_dim": (16, 24, 64, 80, 96, 128, 256),
        "dtype": (torch.float32, torch.bfloat16, torch.float16),
        "is_fused": (True, False),
    }
)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_rope_and_write_matches_reference(case: dict[str, Any]) -> None:
    q, k, v = projections(**case)
    num_tokens, num_kv_heads, head_dim = k.shape
    generator = torch.Generator().manual_seed(1)
    slots = torch.randperm(NUM_SLOTS, generator=generator)[:num_tokens]
    positions = torch.randint(200, (num_tokens,), generator=generator)
    caches = [torch.full((2, 9, 16, num_kv_heads, head_dim), -3.0, dtype=case["dtype"]) for _ in range(2)]
    before = [x.clone() for x in (q, k, v)]
    rotated = rope_and_write(q, k, v, angles(head_dim), positions, caches[0], slots)
    expected = rope_and_write_reference(q, k, v, angles(head_dim), positions, caches[1], slots)
    # |x cos + y sin| <= 2 for inputs in [-1, 1]; -3 marks a slot that nobody wrote
    bound = 2 * ROUNDING_BOUND[case["dtype"]]
    torch.testing.assert_close(rotated, expected, rtol=0, atol=bound)
    torch.testing.assert_close(caches[0], caches[1], rtol=0, atol=bound)
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), before, strict=True))


def test_negative_slot_writes_nothing() -> None:
    q, k, v = projections(5, 2, 1, 16, torch.float32, is_fused=False)
    slots = torch.tensor([20, -1, 21, -1, -1])
    cache = torch.full((2, 3, 16, 2, 16), -3.0)
    rotated = rope_and_write(q, k, v, angles(16), torch.arange(5), cache, slots)
    rows = cache.flatten(1, 2)
    written = (rows != -3.0).flatten(2).any(-1)
    assert written.nonzero().tolist() == [[0, 20], [0, 21], [1, 20], [1, 21]]
    torch.testing.assert_close(rotated, rope_and_write_reference(q, k, v, angles(16), torch.arange(5), cache, slots))
