"""The block pool: counts, sharing, eviction, and what each operation says that it changed."""

import pytest

from common.engine.kv.block_pool import Allocation, BlockPool, RefKind
from common.values.hashing import block_hashes, hash_root
from common.values.ids import BlockHash

USED, HELD = RefKind.USED, RefKind.HELD
ROOT = hash_root({}, 4)


def chain(first_token: int, num_blocks: int) -> list[BlockHash]:
    return block_hashes([first_token + i for i in range(4 * num_blocks)], 4, ROOT)


def compute(pool: BlockPool, hashes: list[BlockHash]) -> list[int]:
    """What a request does: reuse the prefix, allocate the rest, register all."""
    blocks = pool.match_prefix(hashes)
    pool.acquire(blocks, USED)
    blocks += take(pool, len(hashes) - len(blocks))
    for block, block_hash in zip(blocks, hashes, strict=True):
        pool.register(block, block_hash)
    pool.check_invariants()
    return blocks


def take(pool: BlockPool, num: int, kind: RefKind = USED) -> list[int]:
    allocation = pool.allocate(num, kind)
    assert allocation is not None
    return list(allocation.block_ids)


def counts(pool: BlockPool) -> tuple[int, int, int, int]:
    pool.check_invariants()
    stats = pool.stats()
    return stats.used, stats.held, stats.cached, stats.free


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(4, 4)
    assert pool.allocate(5, USED) is None
    assert counts(pool) == (0, 0, 0, 4)
    blocks = take(pool, 4)
    assert sorted(blocks) == [0, 1, 2, 3]
    assert pool.allocate(1, USED) is None
    assert pool.allocate(0, USED) == Allocation((), {})


def test_used_wins_over_held() -> None:
    pool = BlockPool(4, 4)
    blocks = take(pool, 2, HELD)
    assert counts(pool) == (0, 2, 0, 2)
    pool.acquire(blocks[:1], USED)
    assert counts(pool) == (1, 1, 0, 2)
    pool.convert(blocks, HELD, USED)
    assert counts(pool) == (2, 0, 0, 2)
    assert pool.ref_count(blocks[0]) == 2
    assert pool.is_shared(blocks[0])
    assert not pool.is_shared(blocks[1])


def test_released_blocks_stay_findable_until_evicted() -> None:
    pool = BlockPool(8, 4)
    a = chain(0, 3)
    blocks = compute(pool, a)
    pool.release(blocks, USED)
    assert counts(pool) == (0, 0, 3, 5)
    assert pool.match_prefix(a) == blocks
    assert pool.match_prefix([*a[:2], *chain(50, 1)]) == blocks[:2]


def test_running_blocks_are_shared_by_a_prefix_hit() -> None:
    pool = BlockPool(8, 4)
    first = compute(pool, chain(0, 3))
    second = compute(pool, chain(0, 3))
    assert first == second
    assert counts(pool) == (3, 0, 0, 5)
    pool.release(first, USED)
    assert counts(pool) == (3, 0, 0, 5)


def test_never_hashed_blocks_are_taken_before_cached_ones() -> None:
    pool = BlockPool(4, 4)
    a = chain(0, 2)
    pool.release(compute(pool, a), USED)
    take(pool, 2)
    assert len(pool.match_prefix(a)) == 2


def test_eviction_is_least_recently_released_first_and_children_before_parents() -> None:
    pool = BlockPool(6, 4)
    a, b = chain(0, 3), chain(100, 3)
    pool.release(compute(pool, a), USED)
    pool.release(compute(pool, b), USED)
    pool.release(compute(pool, a), USED)  # a is the more recent now
    lengths = []
    for _ in range(6):
        assert pool.allocate(1, USED) is not None
        lengths.append((len(pool.match_prefix(a)), len(pool.match_prefix(b))))
    assert lengths == [(3, 2), (3, 1), (3, 0), (2, 0), (1, 0), (0, 0)]


def test_eviction_is_returned_with_the_block_that_still_holds_the_content() -> None:
    pool = BlockPool(8, 4)
    a, b = chain(0, 4), chain(100, 8)
    blocks = compute(pool, a)
    pool.release(blocks, USED)
    allocation = pool.allocate(8, USED)
    assert allocation is not None
    assert allocation.evicted == dict(zip(a, blocks, strict=True))
    assert pool.match_prefix(a) == []
    assert all(pool.register(block, block_hash) for block, block_hash in zip(allocation.block_ids, b, strict=True))
    assert set(pool.cached_hashes()) == set(b)


def test_copies_of_one_content_are_findable_until_the_last_is_evicted() -> None:
    """Identical cold prompts at once: each computes its own copy; the hash goes with the last one."""
    pool = BlockPool(3, 4)
    a = chain(0, 1)
    first, second = take(pool, 2)
    assert pool.register(first, a[0])
    assert not pool.register(second, a[0])
    pool.release([first], USED)
    assert pool.allocate(2, USED) == Allocation((2, first), {})
    assert pool.match_prefix(a) == [second]
    pool.release([second], USED)
    assert pool.allocate(1, USED) == Allocation((second,), {a[0]: second})


def test_unregistered_content_is_not_found_again() -> None:
    pool = BlockPool(4, 4)
    a = chain(0, 2)
    blocks = compute(pool, a)
    assert pool.unregister(blocks) == a
    assert pool.match_prefix(a) == []
    pool.release(blocks, USED)
    assert counts(pool) == (0, 0, 0, 4)


@pytest.mark.parametrize("kind", [USED, HELD])
def test_double_free_is_a_bug_and_leaves_no_alias(kind: RefKind) -> None:
    pool = BlockPool(4, 4)
    blocks = take(pool, 2, kind)
    pool.release(blocks, kind)
    with pytest.raises(AssertionError, match="reference"):
        pool.release(blocks, kind)
    first, second = pool.allocate(1, USED), pool.allocate(1, USED)
    assert first != second
    pool.check_invariants()


def test_misuse_is_refused() -> None:
    pool = BlockPool(4, 4)
    with pytest.raises(AssertionError, match="no block"):
        pool.release([4], USED)
    with pytest.raises(AssertionError, match="no block"):
        pool.acquire([-1], USED)
    with pytest.raises(AssertionError, match="free block"):
        pool.acquire([0], USED)
    with pytest.raises(AssertionError, match="unreferenced"):
        pool.register(0, chain(0, 1)[0])
    blocks = take(pool, 1, HELD)
    with pytest.raises(AssertionError, match="reference"):
        pool.release(blocks, USED)
    pool.register(blocks[0], chain(0, 1)[0])
    with pytest.raises(AssertionError, match="another hash"):
        pool.register(blocks[0], chain(9, 1)[0])


def test_no_block_leaks_over_many_requests_of_every_length() -> None:
    """Lengths around the block boundary, 500 requests in turn (a leak of one block per request shows by then)."""
    pool = BlockPool(40, 16)
    root = hash_root({}, 16)
    for i in range(500):
        tokens = list(range(i % 130 + 1))
        hashes = block_hashes(tokens, 16, root)
        blocks = pool.match_prefix(hashes)
        pool.acquire(blocks, USED)
        blocks += take(pool, pool.num_blocks_for(len(tokens)) - len(blocks))
        for block, block_hash in zip(blocks, hashes, strict=False):
            pool.register(block, block_hash)
        pool.release(blocks, USED)
        used, held, cached, free = counts(pool)
        assert (used, held) == (0, 0)
        assert cached + free == 40
