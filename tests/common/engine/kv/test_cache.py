"""The cache tensor: layout, copies, slots."""

import mmap

import numpy as np
import pytest
import torch

from common.engine.contract.kv_spec import KVGroup, KVSpec, Plane
from common.engine.kv.cache import KVCache
from tests.caches import attention_spec, planes_of, snapshot

SPEC = attention_spec(num_layers=3, num_kv_heads=2, head_dim=8, dtype=torch.float32, block_size=4)
ROW = Plane("row", (6,), "int8")
# Layers 0 and 2 see all tokens, layers 1, 3 and 4 the last 8.
MIXED = KVSpec(4, (KVGroup((0, 2), (ROW,)), KVGroup((1, 3, 4), (ROW,), window=8)))


def filled_cache() -> KVCache:
    cache = KVCache(SPEC, (5,))
    for idx, plane in enumerate(planes_of(cache)):
        plane.copy_(1000 * idx + torch.arange(plane.numel()).view(plane.shape))
    return cache


def test_layers_are_views_of_the_planes() -> None:
    cache = filled_cache()
    keys, values = cache.planes[0]
    assert keys.shape == values.shape == (3, 5, 4, 2, 8)
    cache.layers[1][0][2, 3].fill_(-1.0)
    assert (keys[1, 2, 3] == -1.0).all()
    assert [plane.shape for plane in cache.layers[1]] == [(5, 4, 2, 8)] * 2


def test_layers_of_several_groups_are_found_by_the_models_numbers() -> None:
    cache = KVCache(MIXED, (5, 3))
    assert [layer[0].shape for layer in cache.layers] == [(blocks, 4, 6) for blocks in (5, 3, 5, 3, 3)]
    cache.layers[3][0].fill_(7)
    assert [bool((cache.planes[1][0][idx] == 7).all()) for idx in range(3)] == [False, True, False]


def test_what_is_said_of_groups_is_given_to_their_layers() -> None:
    assert KVCache(MIXED, (5, 3)).by_layer(["full", "windowed"]) == ["full", "windowed", "full", "windowed", "windowed"]


def test_blocks_are_copied_in_their_own_group() -> None:
    cache = KVCache(MIXED, (3, 3))
    for plane in planes_of(cache):
        plane.copy_(torch.arange(3).view(1, 3, 1, 1).expand_as(plane))
    cache.copy_blocks([(2, 0)], group_idx=1)
    assert [plane[0, :, 0, 0].tolist() for plane in planes_of(cache)] == [[0, 1, 2], [2, 1, 2]]


def test_bytes_per_token_counts_k_and_v_of_all_layers() -> None:
    assert SPEC.bytes_per_token == 2 * 3 * 2 * 8 * 4
    cache = filled_cache()
    assert SPEC.bytes_per_token * 5 * SPEC.block_size == cache.nbytes


def test_copies_read_every_source_before_writing_a_target() -> None:
    cache = filled_cache()
    before = snapshot(cache)
    cache.copy_blocks([(0, 1), (1, 2), (4, 0)])
    for source, target in [(0, 1), (1, 2), (4, 0), (3, 3), (4, 4)]:
        assert torch.equal(snapshot(cache)[:, :, target], before[:, :, source])


def test_no_copies_is_no_change() -> None:
    cache = filled_cache()
    before = snapshot(cache)
    cache.copy_blocks([])
    assert torch.equal(snapshot(cache), before)


@pytest.mark.parametrize("is_shared_with_numpy", [False, True])
def test_freed_memory_is_given_back_whoever_still_holds_a_view(is_shared_with_numpy: bool) -> None:
    """NumPy's views stay readable, and show that the pages below them are new ones."""
    cache = KVCache(SPEC, (4096,))
    storages = [plane.untyped_storage() for plane in planes_of(cache)]
    rows = [plane.view(torch.uint8).flatten().fill_(1) for plane in planes_of(cache)]
    seen = [row.numpy() for row in rows] if is_shared_with_numpy else []
    cache.free()
    if not is_shared_with_numpy:
        assert [storage.nbytes() for storage in storages] == [0, 0]
    for bytes_seen in seen:
        assert np.count_nonzero(bytes_seen) < 2 * mmap.PAGESIZE  # the parts of pages at both ends
    assert cache.nbytes == 0
    assert cache.layers == ()
