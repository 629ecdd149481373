"""Reports under leases: seen by all, gone when nobody renews them, and never trusted to make sense."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from common.cluster.leased_reports import MAX_REPORT_BYTES, LeasedReports
from tests.redis_box import RedisBox, binaries, redis_box
from tests.waiting import until


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisBox]:
    with redis_box(binaries()[0], tmp_path_factory.mktemp("redis")) as server:
        yield server


@asynccontextmanager
async def reports(box: RedisBox, namespace: str, lease_s: float = 60.0) -> AsyncIterator[LeasedReports]:
    opened = LeasedReports(box.url, namespace, "router", lease_s)
    try:
        yield opened
    finally:
        await opened.aclose()


async def test_what_one_process_announces_another_sees_and_the_last_word_counts(box: RedisBox) -> None:
    async with reports(box, "seen") as one, reports(box, "seen") as other, reports(box, "elsewhere") as far:
        assert await one.announce("a", {"load": 1})
        assert await one.announce("a", {"load": 2})
        assert await other.announce("b", {"load": 0})
        assert await one.live() == await other.live() == {"a": {"load": 2}, "b": {"load": 0}}
        assert await far.live() == {}
        await one.withdraw("a")
        assert await other.live() == {"b": {"load": 0}}


async def test_a_report_that_nobody_renews_is_gone_after_its_lease(box: RedisBox) -> None:
    async with reports(box, "lease", lease_s=0.1) as short, reports(box, "lease") as long:
        await long.announce("stays", {})
        await short.announce("goes", {})

        async def is_gone() -> bool:
            return await long.live() == {"stays": {}}

        await until(is_gone)


@pytest.mark.parametrize("value", [b"", b"no json", b"[1]", b"\xff\xfe", b"{" * 1500, b'{"a": "' + b"x" * 9000 + b'"}'])
async def test_values_that_make_no_sense_are_left_out(box: RedisBox, value: bytes) -> None:
    async with reports(box, "nonsense") as opened:
        await opened.announce("good", {"n": 1})
        client = box.client()
        client.set("nonsense:router:bad", value)
        client.sadd("nonsense:routers", "bad", b"\xff", b"n" * 5000)
        assert await opened.live() == {"good": {"n": 1}}


async def test_a_redis_that_is_away_is_said_and_breaks_nothing() -> None:
    opened = LeasedReports("redis://127.0.0.1:9", "away", "router", 1.0)
    assert not await opened.announce("a", {})
    assert await opened.live() is None
    await opened.withdraw("a")
    await opened.aclose()


async def test_a_report_is_bounded(box: RedisBox) -> None:
    async with reports(box, "bounded") as opened:
        with pytest.raises(AssertionError, match="bytes"):
            await opened.announce("a", {"text": "x" * MAX_REPORT_BYTES})


async def test_many_announce_at_once_over_few_connections(box: RedisBox) -> None:
    async with reports(box, "many") as opened:
        assert all(await asyncio.gather(*(opened.announce(f"r{idx}", {"idx": idx}) for idx in range(8))))
        found = await opened.live()
        assert found is not None
        assert len(found) == 8
