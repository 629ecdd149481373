"""Pack and unpack move bits, whatever they mean, and touch no other slot."""

from typing import Any

import pytest
import torch

from common.kernels.chunk import pack_chunk, pack_chunk_reference, unpack_chunk, unpack_chunk_reference
from tests.common.kernels.pairwise import case_id, pairwise

NUM_LAYERS = 4
CASES = pairwise(
    {
        "num_tokens": (0, 1, 15, 16, 17, 33),
        "num_kv_heads": (1, 2, 3),
        "head_dim": (16, 24, 64, 80, 128, 256),
        "block_size": (8, 16, 32),
        "dtype": (torch.float32, torch.bfloat16, torch.float16, torch.uint8),
        "layers": (range(0, 1), range(1, 4), range(0, 4), range(2, 2)),
    }
)


def random_bits(size: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Every bit pattern, NaN with payloads included."""
    size_bytes = (*size[:-1], size[-1] * dtype.itemsize)
    bits = torch.randint(256, size_bytes, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return bits.view(dtype)


def equal_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def inputs(case: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    row = (case["num_kv_heads"], case["head_dim"])
    num_blocks = 64 // case["block_size"]
    cache = random_bits((NUM_LAYERS, 2, num_blocks, case["block_size"], *row), case["dtype"], 0)
    slots = torch.randperm(64, generator=torch.Generator().manual_seed(2))[: case["num_tokens"]]
    payload = random_bits((len(case["layers"]), 2, case["num_tokens"], *row), case["dtype"], 1)
    return cache, slots, payload


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_pack_matches_reference_bit_for_bit(case: dict[str, Any]) -> None:
    cache, slots, payload = inputs(case)
    expected = payload.clone()
    pack_chunk(cache, slots, case["layers"], payload)
    pack_chunk_reference(cache, slots, case["layers"], expected)
    assert equal_bits(payload, expected)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_unpack_matches_reference_bit_for_bit(case: dict[str, Any]) -> None:
    cache, slots, payload = inputs(case)
    expected = cache.clone()
    unpack_chunk(cache, slots, case["layers"], payload)
    unpack_chunk_reference(expected, slots, case["layers"], payload)
    assert equal_bits(cache, expected)


def test_negative_slot_is_skipped_by_unpack_and_zero_in_pack() -> None:
    case = {
        "num_tokens": 20,
        "num_kv_heads": 2,
        "head_dim": 24,
        "block_size": 16,
        "dtype": torch.bfloat16,
        "layers": range(1, 3),
    }
    cache, slots, payload = inputs(case)
    slots[7] = -1
    before = cache.clone()
    unpack_chunk(cache, slots, range(1, 3), payload)
    untouched = torch.ones(64, dtype=torch.bool)
    untouched[slots[slots >= 0]] = False
    assert untouched.sum() == 45
    assert equal_bits(cache.flatten(2, 3)[:, :, untouched], before.flatten(2, 3)[:, :, untouched])
    assert equal_bits(cache[[0, 3]], before[[0, 3]])
    back = torch.full_like(payload, 5.0)
    pack_chunk(cache, slots, range(1, 3), back)
    assert (back[:, :, 7] == 0).all()
    back[:, :, 7] = payload[:, :, 7]
    assert equal_bits(back, payload)


def test_payload_may_lie_in_a_staging_buffer_behind_a_header() -> None:
    cache, slots, _ = inputs(dict(CASES[0], num_tokens=5, num_kv_heads=2, head_dim=16, dtype=torch.float32))
    staging = torch.zeros(64 + 4 * (2 * 2 * 5 * 2 * 16), dtype=torch.uint8)
    payload = staging[64:].view(torch.float32).view(2, 2, 5, 2, 16)
    pack_chunk(cache, slots, range(0, 2), payload)
    assert equal_bits(payload, cache[:2].flatten(2, 3)[:, :, slots])
    assert (staging[:64] == 0).all()


def test_payload_of_another_shape_is_refused() -> None:
    cache, slots, payload = inputs(dict(CASES[0], num_tokens=5, layers=range(0, 2)))
    with pytest.raises(AssertionError):
        pack_chunk(cache, slots, range(0, 3), payload)
    with pytest.raises(AssertionError):
        unpack_chunk(cache, slots[:-1], range(0, 2), payload)
