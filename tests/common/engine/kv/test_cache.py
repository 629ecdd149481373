"""The cache tensor: layout, copies, slots."""

import mmap

import numpy as np
import pytest
import torch

from common.engine.kv.cache import KVCache, KVShape, num_blocks_that_fit

SHAPE = KVShape(num_layers=3, num_kv_heads=2, head_dim=8, dtype=torch.float32)


def filled_cache() -> KVCache:
    cache = KVCache(SHAPE, num_blocks=5, block_size=4)
    cache.data.copy_(torch.arange(cache.data.numel()).view(cache.data.shape))
    return cache


def test_layers_are_views_of_one_allocation() -> None:
    cache = filled_cache()
    assert cache.data.shape == (3, 2, 5, 4, 2, 8)
    cache.layers[1][0, 2, 3].fill_(-1.0)
    assert (cache.data[1, 0, 2, 3] == -1.0).all()
    assert cache.layers[1].shape == (2, 5, 4, 2, 8)


def test_bytes_per_token_counts_k_and_v_of_all_layers() -> None:
    assert SHAPE.bytes_per_token == 2 * 3 * 2 * 8 * 4
    cache = filled_cache()
    assert SHAPE.bytes_per_token * cache.num_slots == cache.data.nbytes


def test_copies_read_every_source_before_writing_a_target() -> None:
    cache = filled_cache()
    before = cache.data.clone()
    cache.copy_blocks([(0, 1), (1, 2), (4, 0)])
    for source, target in [(0, 1), (1, 2), (4, 0), (3, 3), (4, 4)]:
        assert torch.equal(cache.data[:, :, target], before[:, :, source])


def test_no_copies_is_no_change() -> None:
    cache = filled_cache()
    before = cache.data.clone()
    cache.copy_blocks([])
    assert torch.equal(cache.data, before)


def test_a_budget_buys_whole_blocks_and_at_least_one() -> None:
    block_bytes = SHAPE.bytes_per_token * 16
    assert num_blocks_that_fit(10 * block_bytes + 1, SHAPE, 16) == 10
    with pytest.raises(ValueError, match="less than one block of 16 tokens"):
        num_blocks_that_fit(block_bytes - 1, SHAPE, 16)


@pytest.mark.parametrize("is_shared_with_numpy", [False, True])
def test_freed_memory_is_given_back_whoever_still_holds_a_view(is_shared_with_numpy: bool) -> None:
    """NumPy's views stay readable, and show that the pages below them are new ones."""
    cache = KVCache(SHAPE, num_blocks=1024, block_size=16)
    storage = cache.data.untyped_storage()
    rows = cache.data.view(torch.uint8).flatten()
    seen = rows.numpy() if is_shared_with_numpy else None
    rows.fill_(1)
    cache.free()
    if seen is None:
        assert storage.nbytes() == 0
    else:
        assert np.count_nonzero(seen) < 2 * mmap.PAGESIZE  # the parts of pages at both ends
    assert cache.data.nbytes == 0
    assert cache.layers == ()
