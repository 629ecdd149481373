"""The roll: every router sees the load of all, and one that goes is forgotten."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict

import pytest

from common.cluster.leased_reports import LeasedReports
from common.cluster.reports import LoadingWorker, RouterReport, loading_reports
from common.values.config import ClusterConfig, RouterConfig
from router.router_registry import RouterRegistry, own_report
from tests.redis_box import RedisBox, binaries, redis_box
from tests.waiting import until


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisBox]:
    with redis_box(binaries()[0], tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.router_registry.INTERVAL_S", 0.02)


class Rig:
    """One router's roll and its load."""

    def __init__(self, reports: LeasedReports, loading: LeasedReports, name: str) -> None:
        self.load = (True, 0, 0)
        self.roll = RouterRegistry(reports, loading, own_report(name, "127.0.0.1", 8000, 50051, ""), lambda: self.load)

    async def sees(self, *names: str) -> None:
        """Return when it knows these routers and no other."""

        async def is_so() -> bool:
            return set(self.seen()) == set(names)

        await until(is_so)

    def seen(self) -> dict[str, tuple[bool, int, int]]:
        return {r.router_id: (r.is_ready, r.num_running, r.num_queued) for r in self.roll.routers()}


@asynccontextmanager
async def on_the_roll(box: RedisBox, namespace: str, name: str) -> AsyncIterator[Rig]:
    reports = LeasedReports(box.url, namespace, "router", 60.0)
    loading = loading_reports(box.url, namespace)
    rig = Rig(reports, loading, name)
    running = asyncio.create_task(rig.roll.run())
    try:
        yield rig
    finally:
        rig.roll.stop()
        await running
        await reports.aclose()
        await loading.aclose()


async def test_each_router_sees_the_load_of_all_and_its_own_without_delay(box: RedisBox) -> None:
    async with on_the_roll(box, "two", "b") as b, on_the_roll(box, "two", "a") as a:
        b.load = (False, 3, 5)

        async def sees_load() -> bool:
            return a.seen() == {"a": (True, 0, 0), "b": (False, 3, 5)}

        await until(sees_load)
        a.load = (True, 1, 2)
        assert a.seen()["a"] == (True, 1, 2)

        async def both_see_it() -> bool:
            return b.seen() == a.seen()

        await until(both_see_it)


async def test_a_router_that_stops_is_forgotten_at_once(box: RedisBox) -> None:
    async with on_the_roll(box, "stop", "a") as a:
        async with on_the_roll(box, "stop", "b"):
            await a.sees("a", "b")
        await a.sees("a")


async def test_without_redis_a_router_knows_itself_alone() -> None:
    reports = LeasedReports("redis://127.0.0.1:9", "away", "router", 1.0)
    rig = Rig(reports, reports, "a")
    running = asyncio.create_task(rig.roll.run())
    await asyncio.sleep(0)
    assert rig.seen() == {"a": (True, 0, 0)}
    rig.roll.stop()
    await running
    await reports.aclose()


@pytest.mark.parametrize(
    "change",
    [{"router_id": "another"}, {"num_queued": "many"}, {"http_url": 5}, {"extra": 1}, {"is_ready": None}, {"pid": []}],
)
async def test_reports_of_nobody_are_left_out(box: RedisBox, change: dict[str, object]) -> None:
    strange = LeasedReports(box.url, "strange", "router", 60.0)
    report = asdict(RouterReport("x", "http://127.0.0.1:1", "127.0.0.1:2", 1))
    await strange.announce("x", {**report, **change})
    await strange.announce("y", {**report, "router_id": "y"})
    async with on_the_roll(box, "strange", "a") as a:
        await a.sees("a", "y")
    await strange.aclose()


async def test_workers_that_load_are_seen_and_nonsense_is_not(box: RedisBox) -> None:
    reports = loading_reports(box.url, "loads")
    worker = LoadingWorker("prefill-0", "prefill", "reading weights", 0.5, 2.0)
    await reports.announce("prefill-0", asdict(worker))
    await reports.announce("decode-0", {**asdict(worker), "worker_id": "decode-0", "share": "much"})
    await reports.announce("decode-1", asdict(worker))
    async with on_the_roll(box, "loads", "a") as a:

        async def is_seen() -> bool:
            return a.roll.loading() == (worker,)

        await until(is_seen)
    await reports.aclose()


@pytest.mark.parametrize(
    ("host", "url"),
    [("10.1.2.3", "http://10.1.2.3:80"), ("::1", "http://[::1]:80"), ("0.0.0.0", "http://127.0.0.1:80")],
)
def test_the_address_shown_is_one_that_others_can_use(host: str, url: str) -> None:
    report = own_report("a", host, 80, 90, "redis://:secret@127.0.0.1:6379/0")
    assert (report.http_url, report.pid) == (url, os.getpid())
    assert report.grpc_address == url.removeprefix("http://").replace(":80", ":90")


def test_a_router_with_a_certificate_is_reached_by_https() -> None:
    assert own_report("a", "10.0.0.1", 443, 90, "", has_tls=True).http_url == "https://10.0.0.1:443"


def test_a_router_without_a_name_has_one_of_its_own() -> None:
    config = ClusterConfig()
    names = {config.router_config().router_id for _ in range(50)} | {RouterConfig(model=config.model).router_id}
    assert len(names) == 51
    named = ClusterConfig.model_validate({"router": {"router_id": "pod-3"}})
    assert named.router_config().router_id == "pod-3"
    with pytest.raises(ValueError, match="router_id"):
        ClusterConfig.model_validate({"router": {"router_id": "a b"}})
