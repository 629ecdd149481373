"""How much each worker has in the index, and what others have of it."""

import hashlib

import pytest

from common.cluster.prefix_index.stats import MAX_COMPARED, SAMPLE_SIZE, WorkerIndexStats, index_stats
from common.values.ids import WorkerRef

A, B, C = (WorkerRef(name, "1") for name in "abc")


def blocks(numbers: range) -> set[bytes]:
    return {hashlib.sha256(b"%d" % number).digest()[:16] for number in numbers}


def test_each_worker_has_its_count_and_what_it_shares_with_the_one_that_has_most_of_it() -> None:
    assert index_stats({A: blocks(range(40)), B: blocks(range(10, 40)), C: blocks(range(30, 50))}) == (
        WorkerIndexStats("a", 40, 0.25, "b", 0.75),
        WorkerIndexStats("b", 30, 0.0, "a", 1.0),
        WorkerIndexStats("c", 20, 0.5, "a", 0.5),
    )


def test_a_worker_without_blocks_and_one_alone_are_counted() -> None:
    assert index_stats({A: blocks(range(5))}) == (WorkerIndexStats("a", 5, 1.0),)
    assert index_stats({A: blocks(range(5)), B: set()}) == (WorkerIndexStats("a", 5, 1.0), WorkerIndexStats("b", 0))
    assert index_stats({}) == ()


def test_shares_of_a_large_set_are_estimated() -> None:
    large, half = index_stats({A: blocks(range(50 * SAMPLE_SIZE)), B: blocks(range(25 * SAMPLE_SIZE))})
    assert large.num_blocks == 50 * SAMPLE_SIZE
    assert large.most_shared == pytest.approx(0.5, abs=0.3)
    assert half.most_shared == 1.0


def test_many_workers_are_only_counted() -> None:
    refs = [WorkerRef(f"w{number}", "1") for number in range(MAX_COMPARED + 1)]
    expected = tuple(WorkerIndexStats(ref.worker_id, 3) for ref in refs)
    assert index_stats(dict.fromkeys(refs, blocks(range(3)))) == expected
