"""How memory is divided among groups of layers, and what fits into it."""

from dataclasses import replace

import pytest

from common.engine.contract.kv_spec import KVGroup, KVSpec, Plane
from common.engine.kv.block_pool import BlockPool
from common.engine.kv.sizing import Demand, longest_sequence, num_blocks_asked_for, num_blocks_that_fit
from common.engine.scheduling.block_tables import BlockTables, PoolGroup

ROW = Plane("row", (6,), "int8")
FULL, WINDOWED = KVGroup((0, 2), (ROW,)), KVGroup((1, 3, 4), (ROW,), window=8)
ONE, MIXED, NARROW = KVSpec(4, (FULL,)), KVSpec(4, (FULL, WINDOWED)), KVSpec(4, (replace(WINDOWED, layers=(0, 1)),))
# Blocks of 48 bytes without a window, of 72 with one, where a sequence has 6 (two windows and two), a chunk 2 more.
DEMAND = Demand(max_len=160, max_num_seqs=10, max_chunk=8)


def num_bytes(full: int, windowed: int) -> int:
    return 48 * full + 72 * windowed


def test_a_budget_buys_whole_blocks_and_at_least_one() -> None:
    assert num_blocks_that_fit(10 * ONE.bytes_per_block + 1, ONE, DEMAND) == (10,)
    for spec in (ONE, MIXED):
        with pytest.raises(ValueError, match="less than one block of 4 tokens"):
            num_blocks_that_fit(spec.bytes_per_block - 1, spec, DEMAND)


def test_a_group_with_a_window_gets_what_running_sequences_need_and_the_other_all_the_rest() -> None:
    assert num_blocks_that_fit(num_bytes(1000, 62), MIXED, DEMAND) == (1000, 62)
    assert num_blocks_that_fit(num_bytes(9000, 62) + 47, MIXED, DEMAND) == (9000, 62)


def test_fewer_sequences_have_room_when_the_longest_would_not_fit_beside_more() -> None:
    """40 blocks for 160 tokens; 4 sequences would leave 39."""
    assert num_blocks_that_fit(num_bytes(39, 26), MIXED, DEMAND) == (48, 20)
    assert num_blocks_that_fit(num_bytes(40, 26), MIXED, DEMAND) == (40, 26)


def test_the_others_have_no_fewer_tokens_than_a_group_with_a_window() -> None:
    """Ten sequences that are no longer than their windows need as much in both."""
    short = replace(DEMAND, max_len=24)
    assert num_blocks_that_fit(num_bytes(61, 62), MIXED, short) == (70, 56)
    assert num_blocks_that_fit(num_bytes(62, 62), MIXED, short) == (62, 62)


def test_a_budget_too_small_for_one_long_sequence_is_shared_out_alike() -> None:
    assert num_blocks_that_fit(num_bytes(5, 5), MIXED, DEMAND) == (5, 5)
    assert num_blocks_that_fit(num_bytes(20, 8), MIXED, DEMAND) == (20, 8)


def test_a_model_of_windows_alone_has_all_memory_for_them() -> None:
    assert num_blocks_that_fit(48 * 100, NARROW, DEMAND) == (100,)


def test_of_blocks_that_are_asked_for_a_window_takes_no_more_than_it_needs() -> None:
    assert num_blocks_asked_for(1000, MIXED, DEMAND) == (1000, 62)
    assert num_blocks_asked_for(30, MIXED, DEMAND) == (30, 30)


@pytest.mark.parametrize(
    ("spec", "num_blocks", "longest"),
    [
        (ONE, (10,), 40),
        (ONE, (1000,), 160),
        (MIXED, (10, 6), 40),
        (MIXED, (30, 5), 20),
        (MIXED, (30, 6), 120),
        (NARROW, (6,), 160),
        (NARROW, (5,), 20),
    ],
)
def test_the_longest_sequence_is_one_that_the_pools_never_refuse(
    spec: KVSpec, num_blocks: tuple[int, ...], longest: int
) -> None:
    assert longest_sequence(spec, num_blocks, limit=160) == longest
    pools = [PoolGroup(BlockPool(num, 4), group.window) for num, group in zip(num_blocks, spec.groups, strict=True)]
    tables = BlockTables(pools, 0.0, {}, max_chunk=8)
    assert tables.never_fits(longest) is None
    assert longest == 160 or any(tables.never_fits(longest + more) for more in range(1, 5))
