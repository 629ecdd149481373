"""Pack and unpack move bits, whatever they mean, and touch no other slot."""

import pytest
import torch

from common.engine.devices.triton.chunk import pack_chunk, unpack_chunk
from tests.common.engine.devices.triton.cases import equal_bits
from tests.common.engine.devices.triton.checks import GRIDS, chunk_inputs
from tests.common.engine.devices.triton.pairwise import Case, case_id

CASE: Case = {
    "num_tokens": 20,
    "num_kv_heads": 2,
    "head_dim": 24,
    "block_size": 16,
    "dtype": torch.bfloat16,
    "layers": range(1, 3),
}


@pytest.mark.parametrize("case", GRIDS["pack_chunk"].cases, ids=case_id)
def test_pack_matches_reference_bit_for_bit(case: Case) -> None:
    GRIDS["pack_chunk"].check(case, "cpu")


@pytest.mark.parametrize("case", GRIDS["unpack_chunk"].cases, ids=case_id)
def test_unpack_matches_reference_bit_for_bit(case: Case) -> None:
    GRIDS["unpack_chunk"].check(case, "cpu")


def test_negative_slot_is_skipped_by_unpack_and_zero_in_pack() -> None:
    cache, slots, payload = chunk_inputs(CASE)
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
    cache, slots, _ = chunk_inputs({**CASE, "num_tokens": 5, "head_dim": 16, "dtype": torch.float32})
    staging = torch.zeros(64 + 4 * (2 * 2 * 5 * 2 * 16), dtype=torch.uint8)
    payload = staging[64:].view(torch.float32).view(2, 2, 5, 2, 16)
    pack_chunk(cache, slots, range(0, 2), payload)
    assert equal_bits(payload, cache[:2].flatten(2, 3)[:, :, slots])
    assert (staging[:64] == 0).all()


def test_payload_of_another_shape_is_refused() -> None:
    cache, slots, payload = chunk_inputs({**CASE, "layers": range(0, 2)})
    with pytest.raises(AssertionError):
        pack_chunk(cache, slots, range(0, 3), payload)
    with pytest.raises(AssertionError):
        unpack_chunk(cache, slots[:-1], range(0, 2), payload)
