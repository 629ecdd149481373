"""The census: how much each worker has in the index, and what others have of it."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from common.cluster.keys import Keys
from common.cluster.prefix_index.census import MAX_COMPARED, SAMPLE_SIZE, IndexCensus, WorkerCensus
from common.values.ids import WorkerRef
from tests.redis_box import RedisBox, binaries, redis_box

A, B, C = (WorkerRef(name, "1") for name in "abc")


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisBox]:
    with redis_box(binaries()[0], tmp_path_factory.mktemp("redis")) as server:
        yield server


def store(box: RedisBox, namespace: str, ref: WorkerRef, blocks: range) -> None:
    box.client().sadd(Keys(namespace).members(ref), *(f"{idx:016}" for idx in blocks))


@asynccontextmanager
async def census(redis_url: str, namespace: str) -> AsyncIterator[IndexCensus]:
    opened = IndexCensus(redis_url, namespace)
    try:
        yield opened
    finally:
        await opened.aclose()


async def test_each_worker_has_its_count_and_what_it_shares_with_the_one_that_has_most_of_it(box: RedisBox) -> None:
    store(box, "n", A, range(40))
    store(box, "n", B, range(10, 40))
    store(box, "n", C, range(30, 50))
    async with census(box.url, "n") as opened:
        assert await opened.take([A, B, C]) == (
            WorkerCensus("a", 40, 0.25, "b", 0.75),
            WorkerCensus("b", 30, 0.0, "a", 1.0),
            WorkerCensus("c", 20, 0.5, "a", 0.5),
        )


async def test_a_worker_without_blocks_and_one_alone_are_counted(box: RedisBox) -> None:
    store(box, "alone", A, range(5))
    async with census(box.url, "alone") as opened:
        assert await opened.take([A]) == (WorkerCensus("a", 5, 1.0),)
        assert await opened.take([A, B]) == (WorkerCensus("a", 5, 1.0), WorkerCensus("b", 0))
        assert await opened.take([]) == ()


async def test_shares_of_a_large_set_are_estimated(box: RedisBox) -> None:
    store(box, "large", A, range(50 * SAMPLE_SIZE))
    store(box, "large", B, range(25 * SAMPLE_SIZE))
    async with census(box.url, "large") as opened:
        found = await opened.take([A, B])
    assert found is not None
    assert found[0].num_blocks == 50 * SAMPLE_SIZE
    assert found[0].most_shared == pytest.approx(0.5, abs=0.3)
    assert found[1].most_shared == 1.0


async def test_many_workers_are_only_counted(box: RedisBox) -> None:
    refs = [WorkerRef(f"w{idx}", "1") for idx in range(MAX_COMPARED + 1)]
    for ref in refs:
        store(box, "many", ref, range(3))
    async with census(box.url, "many") as opened:
        assert await opened.take(refs) == tuple(WorkerCensus(ref.worker_id, 3) for ref in refs)


async def test_without_redis_or_with_strange_values_there_is_none(box: RedisBox) -> None:
    async with census("redis://127.0.0.1:9", "n") as away:
        assert await away.take([A]) is None
    box.client().set(Keys("strange").members(A), "no set")
    async with census(box.url, "strange") as opened:
        assert await opened.take([A]) is None
