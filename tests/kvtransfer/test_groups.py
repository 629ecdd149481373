"""A model whose layers are in two groups, over real sessions: what is behind the window stays where it is."""

import torch

from common.engine.contract.kv_spec import KVGroup, KVSpec, Plane
from common.engine.kv.cache import KVCache
from kvtransfer.events import FirstTokensSampled, TokensComputed, TransferExpected, TransferOutcome, TransferStarted
from tests.caches import fill
from tests.kvtransfer.cluster import DECODE, FIRST, new_transfer_id, pair

NUM_TOKENS, WINDOW = 100, 24
FIRST_NEEDED = NUM_TOKENS - WINDOW + 1
ROW = Plane("row", (4,), "float32")
# Layers 1 and 3 see all tokens, layers 0, 2 and 4 the last 24.
GROUPS = (KVGroup((1, 3), (ROW,)), KVGroup((0, 2, 4), (ROW,), window=WINDOW))
BEHIND = -1  # an entry of a block table that is behind the window: no block


def new_cache(block_size: int, num_blocks: tuple[int, int]) -> KVCache:
    cache = KVCache(KVSpec(block_size, GROUPS), num_blocks)
    fill(cache, 0.0)
    return cache


def rows_of(cache: KVCache, group_idx: int, table: tuple[int, ...], first: int) -> torch.Tensor:
    """[layers, tokens from `first` on, 4]; the plain way."""
    size = cache.block_size
    slots = [table[position // size] * size + position % size for position in range(first, NUM_TOKENS)]
    return cache.planes[group_idx][0].flatten(1, 2)[:, slots]


async def test_a_windowed_group_ships_what_later_tokens_read_and_no_block_behind_it() -> None:
    """1. The decode worker has no block for what lies behind the window, nor has the prefill worker any more.  2. The
    transfer is done.  3. Both groups hold the sender's rows, and no other slot was written.
    """
    source, target = new_cache(16, (8, 4)), new_cache(8, (16, 5))
    for group_planes in source.planes:
        group_planes[0].copy_(torch.randn(group_planes[0].shape, generator=torch.Generator().manual_seed(1)))
    source_tables = (6, 1, 4, 0, 2, 7, 3), (BEHIND, BEHIND, BEHIND, BEHIND, 3, 0, 2)
    target_tables = tuple(range(13)), (*[BEHIND] * 9, 1, 4, 0, 3)
    async with pair(caches=(source, target)) as cluster:
        transfer_id = new_transfer_id("r1")
        cluster.decode.loop.post(TransferExpected(transfer_id.attempt_id, 0, NUM_TOKENS, target_tables, len(FIRST)))
        cluster.prefill.loop.post(
            TransferStarted(transfer_id, DECODE, cluster.address, 0, NUM_TOKENS, source_tables, deadline_s=1e12)
        )
        for token_end in (40, 90, NUM_TOKENS):
            for num_layers in range(1, 6):
                cluster.prefill.loop.post(TokensComputed(transfer_id, num_layers, token_end))
        cluster.prefill.loop.post(FirstTokensSampled(transfer_id, FIRST))
        assert await cluster.until_ended(transfer_id) is TransferOutcome.DONE
        received = cluster.decode.received[transfer_id]
    for group_idx, first in enumerate((0, FIRST_NEEDED)):
        ours, theirs = (
            rows_of(cache, group_idx, tables[group_idx], first)
            for cache, tables in ((source, source_tables), (target, target_tables))
        )
        assert torch.equal(ours, theirs)
        assert int(target.planes[group_idx][0].count_nonzero()) == theirs.numel()
    num_rows = 2 * NUM_TOKENS + 3 * (NUM_TOKENS - FIRST_NEEDED)
    assert received.num_bytes == num_rows * ROW.row_bytes + received.num_chunks * 64
