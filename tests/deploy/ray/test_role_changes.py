"""What the pools do with the answers of actors that are asked to change their role. The actors are made up: no Ray."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from common.values.config import ClusterConfig, ModelConfig, PoolSettings, WorkerConfig
from common.values.messages import Role
from common.worker.control import RoleChangeFailed
from common.worker.role_change import RoleChangeRefused
from deploy.ray.placement import FoundWorker
from deploy.ray.pools import RayPools
from tests.waiting import until


class TaskError(Exception):
    """As Ray's: what the worker raised is inside."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class Method:
    """`actor.method`, with its `remote`."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.remote = call


class FakeActor:
    """`answer`: what a change of role ends in; None = it is done."""

    def __init__(self, pid: int, answer: Exception | None) -> None:
        self.pid = pid
        self.answer = answer
        self.ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.start = Method(self._start)
        self.wait = Method(lambda limit_s: asyncio.shield(self.ended))
        self.drain = Method(lambda grace_s: self.end())
        self.change_role = Method(self._change)

    def end(self, reason: Exception | None = None) -> None:
        if not self.ended.done() and reason is not None:
            self.ended.set_exception(TaskError(reason))
        elif not self.ended.done():
            self.ended.set_result(True)

    async def _start(self) -> dict[str, Any]:
        return {"pid": self.pid, "address": "127.0.0.1:1"}

    async def _change(self, config_json: str, grace_s: float) -> dict[str, Any]:
        if isinstance(self.answer, RoleChangeFailed):
            self.end(MemoryError("no room for its KV cache"))
        if self.answer is not None:
            raise TaskError(self.answer)
        return {"pid": self.pid, "address": "127.0.0.1:2"}


class FakePlacement:
    is_lasting = False

    def __init__(self, config: ClusterConfig, answer: Exception | None) -> None:
        self._config = config
        self._answer = answer
        self.actors: list[FakeActor] = []
        self.asked: list[dict[str, int]] = []
        self.num_deaf = 0  # so many requests for nodes fail

    def create(self, role: Role, worker_id: str) -> FakeActor:
        self.actors.append(FakeActor(len(self.actors), self._answer))
        return self.actors[-1]

    def worker_config(self, role: Role, worker_id: str) -> WorkerConfig:
        return self._config.worker_config(role.value, worker_id)

    def find(self) -> list[FoundWorker]:
        return []

    def request_nodes(self, num_workers: Mapping[str, int]) -> None:
        self.asked.append(dict(num_workers))
        if len(self.asked) <= self.num_deaf:
            raise ConnectionError("Ray is away")


class NoStore:
    """A Redis that is away."""

    async def announce(self, desired: Mapping[str, int], status: Mapping[str, object]) -> None:
        return None

    async def get_kept(self, configured: Mapping[str, int]) -> None:
        return None

    async def keep(self, configured: Mapping[str, int], desired: Mapping[str, int]) -> bool:
        return True


class Rig:
    def __init__(self, config: ClusterConfig, answer: Exception | None) -> None:
        self.reports: list[tuple[str, str]] = []
        self.placement = FakePlacement(config, answer)
        self.pools = RayPools(config, lambda who, what: self.reports.append((who, what)), self.placement)

    async def until_still(self, prefill: int, decode: int) -> None:
        async def is_so() -> bool:
            statuses = self.pools.status()
            return [s.desired for s in statuses] == [prefill, decode] and all(s.is_still for s in statuses)

        await until(is_so)


@asynccontextmanager
async def running(
    monkeypatch: pytest.MonkeyPatch, answer: Exception | None = None, **worker: Any
) -> AsyncIterator[Rig]:
    """2+1 workers."""
    monkeypatch.setattr("deploy.ray.pools._kill", lambda actor: actor.end())
    settings = {"decode_worker": worker, "pools": PoolSettings(prefill=2, decode=1)}
    rig = Rig(ClusterConfig(redis_url="x", model=ModelConfig(path="x"), **settings), answer)  # type: ignore[arg-type]
    controller = asyncio.create_task(rig.pools.run(NoStore()))  # type: ignore[arg-type]
    try:
        await rig.until_still(2, 1)
        yield rig
        async with asyncio.timeout(60):
            await rig.pools.empty()
    finally:
        controller.cancel()
        await asyncio.gather(controller, return_exceptions=True)


async def test_the_same_actor_serves_under_its_new_name(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch) as rig:
        rig.pools.resize(1, 2)
        await rig.until_still(1, 2)
        assert len(rig.placement.actors) == 3
        assert ("prefill-1", "changing to decode, as decode-1") in rig.reports
        assert ("decode-1", "ready after 0.0 s (pid 1, 127.0.0.1:2)") in rig.reports
        rig.placement.actors[1].end(MemoryError("later"))

        async def is_told() -> bool:
            return ("decode-1", "ended: MemoryError: later") in rig.reports

        await until(is_told)
        await rig.until_still(1, 2)


async def test_a_refusal_is_told_and_another_worker_started(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch, RoleChangeRefused("dtype: made up")) as rig:
        rig.pools.resize(1, 2)
        await rig.until_still(1, 2)
        assert len(rig.placement.actors) == 4
        assert ("prefill-1", "cannot change to decode: RoleChangeRefused: dtype: made up") in rig.reports
        assert ("prefill-1", "ended") in rig.reports
        assert rig.pools.status()[1].num_crashes == 0


async def test_a_worker_that_dies_of_its_change_is_replaced_and_its_end_told_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running(monkeypatch, RoleChangeFailed("the worker ended")) as rig:
        rig.pools.resize(1, 2)
        await rig.until_still(1, 2)
        assert rig.reports.count(("decode-1", "ended: MemoryError: no room for its KV cache")) == 1
        assert rig.pools.status()[1].num_crashes == 1


async def test_roles_that_are_configured_too_differently_are_told_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch, dtype="bfloat16") as rig:
        text = "no worker can change its role: dtype: 'auto' as prefill, 'bfloat16' as decode"
        assert ("pools", text) in rig.reports
        rig.pools.resize(1, 2)
        await rig.until_still(1, 2)
        assert len(rig.placement.actors) == 4


async def test_nodes_are_asked_for_until_ray_has_heard_and_the_trouble_is_told_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("deploy.ray.pools.ANNOUNCE_INTERVAL_S", 0.01)
    monkeypatch.setattr(FakePlacement, "is_lasting", True)
    async with running(monkeypatch) as rig:
        rig.placement.asked.clear()
        rig.placement.num_deaf = 3
        rig.pools.resize(3, 1)

        async def is_heard() -> bool:
            return len(rig.placement.asked) > 3

        await until(is_heard)
        assert rig.placement.asked == [{"prefill": 3, "decode": 1}] * 4
        assert [what for who, what in rig.reports if who == "ray"] == ["nodes cannot be asked for: Ray is away"]
