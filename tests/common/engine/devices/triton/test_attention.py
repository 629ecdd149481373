"""Both attention kernels against the float64 reference, unused slots poisoned throughout."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from common.engine.contract.attention import AttentionBatch
from common.engine.devices.triton.decode_attention import SPLIT_LEN, decode_attention, decode_attention_reference
from common.engine.devices.triton.prefill_attention import prefill_attention, prefill_attention_reference, prefill_tiles
from tests.common.engine.devices.triton.cases import AttentionCase, Shape, attention_case
from tests.common.engine.devices.triton.checks import GRIDS, compare_attention
from tests.common.engine.devices.triton.pairwise import Case, case_id


@pytest.mark.parametrize("case", GRIDS["prefill_attention"].cases, ids=case_id)
def test_prefill_matches_float64_reference(case: Case) -> None:
    GRIDS["prefill_attention"].check(case, "cpu")


@pytest.mark.parametrize("case", GRIDS["decode_attention"].cases, ids=case_id)
def test_decode_matches_float64_reference(case: Case) -> None:
    GRIDS["decode_attention"].check(case, "cpu")


def test_prefill_kernel_serves_single_tokens_among_chunks() -> None:
    mixed = attention_case(((300, 1), (90, 40), (17, 1)), Shape())
    compare_attention(prefill_attention, prefill_attention_reference, mixed)


@pytest.mark.parametrize("kv_dtype", (None, torch.int8))
def test_persistent_prefill_gives_the_same_bits(kv_dtype: torch.dtype | None) -> None:
    """More tiles than programs, so that every program takes several."""
    shape = Shape(head_dim=16, dtype=torch.bfloat16, kv_dtype=kv_dtype)
    case = attention_case(((200, 140), (40, 1), (0, 0), (90, 90)), shape)
    tiles = prefill_tiles(140 * 2, 16, torch.bfloat16)
    expected = prefill_attention(case.q, case.kv, case.batch, case.scale, tiles=tiles)
    persistent = replace(tiles, is_persistent=True)
    assert torch.equal(prefill_attention(case.q, case.kv, case.batch, case.scale, tiles=persistent), expected)


@pytest.mark.parametrize(("kv_dtype", "bound"), ((torch.int8, 0.015), (torch.float8_e4m3fn, 0.05)), ids=str)
def test_a_quantized_cache_is_near_float64_attention_over_what_was_written(kv_dtype: torch.dtype, bound: float) -> None:
    """Values in [-1, 1] and scores of a few units: the whole error of storing KV in codes."""
    lengths = ((300, 1), (33, 1), (64, 1))
    exact = attention_case(lengths, Shape())
    coded = attention_case(lengths, Shape(kv_dtype=kv_dtype))
    expected = decode_attention_reference(exact.q, exact.kv, exact.batch, exact.scale)
    for kernel in (decode_attention, prefill_attention):
        out = kernel(coded.q, coded.kv, coded.batch, coded.scale)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=bound)


def test_decode_of_empty_sequence_is_zero() -> None:
    case = attention_case(((0, 1), (3, 1)), Shape())
    out = decode_attention(case.q, case.kv, case.batch, case.scale)
    assert (out[0] == 0).all()
    assert (out[1] != 0).all()


def test_decode_merges_more_splits_than_one_tile_of_them() -> None:
    """The largest scores come last, so that what was merged before must be scaled down."""
    case = attention_case(((18 * SPLIT_LEN + 5, 1),), Shape(head_dim=16, num_kv_heads=1))
    rising = torch.linspace(0.1, 3.0, 18 * SPLIT_LEN + 5)
    key = case.kv[0].view(-1, 16)
    blocks = case.batch.block_tables[0].long()
    position = torch.arange(len(rising))
    key[blocks[position // 16] * 16 + position % 16] = rising[:, None] * case.q[0, 0].sign()
    compare_attention(decode_attention, decode_attention_reference, case)


def test_decode_of_a_sequence_does_not_depend_on_its_batch() -> None:
    lengths = ((SPLIT_LEN + 44, 1), (7, 1), (3 * SPLIT_LEN, 1))
    case = attention_case(lengths, Shape(dtype=torch.bfloat16))
    together = decode_attention(case.q, case.kv, case.batch, case.scale)
    for idx, (seq_len, _) in enumerate(lengths):
        alone = decode_attention(case.q[idx : idx + 1], case.kv, only(case, idx, seq_len), case.scale)
        assert torch.equal(alone[0], together[idx])


def only(case: AttentionCase, idx: int, seq_len: int) -> AttentionBatch:
    """The batch of one decode sequence of a case."""
    batch = case.batch
    rows = slice(idx, idx + 1)
    return AttentionBatch(
        batch.positions[rows],
        batch.slot_mapping[rows],
        torch.tensor([0, 1], dtype=torch.int32),
        batch.seq_lens[rows],
        batch.block_tables[rows],
        1,
        seq_len,
    )


@pytest.mark.parametrize("kernel", (prefill_attention, decode_attention))
def test_result_does_not_depend_on_the_order_of_programs(kernel: Any, run_in_order: Any) -> None:
    case = attention_case(((600, 1), (17, 1), (129, 1)), Shape(group=3))
    natural = kernel(case.q, case.kv, case.batch, case.scale)
    for order in (
        lambda n: list(reversed(range(n))),
        lambda n: random.Random(1).sample(range(n), n),
    ):
        run_in_order(order)
        assert torch.equal(kernel(case.q, case.kv, case.batch, case.scale), natural)
