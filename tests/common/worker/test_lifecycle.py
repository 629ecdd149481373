"""A worker's life around fake roles and a real (tiny) model: order of its ends, changes of role, nothing left open."""

import asyncio
import socket
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from common.values.config import ModelConfig, WorkerConfig
from common.values.errors import PdserveError
from common.values.ids import BlockHash, RouterId
from common.values.messages import WorkerInfo, WorkerStats
from common.worker.audit import Audit
from common.worker.control import RoleChangeFailed, WorkerControl
from common.worker.lifecycle import WorkerContext, run_worker
from common.worker.watchdog import StepWedged
from tests.tiny_model import write_tiny_model
from tests.waiting import until

LIMIT_S = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny")


def config_of(model: Path, role: str = "prefill", **settings: Any) -> WorkerConfig:
    chosen = {"num_blocks": 8, "dtype": "float32", "num_threads": 1, **settings}
    return WorkerConfig(role=role, worker_id=f"{role}-0", model=ModelConfig(path=str(model)), **chosen)  # type: ignore[arg-type]


class FakeRole:
    """Drains at once unless it `is_busy`; notes what is done to it."""

    def __init__(self, around: WorkerContext) -> None:
        self.around = around
        self.drained = asyncio.Event()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.calls: list[str] = []
        self.is_busy = False
        self.stays_at_work = False

    def fail(self, error: BaseException) -> None:
        self.failed.set_exception(error)

    def on_message(self, router_id: RouterId, message: object) -> None:
        self.calls.append(type(message).__name__)

    def on_router_lost(self, router_id: RouterId) -> None:
        self.calls.append("router lost")

    def drain(self, grace_s: float) -> None:
        self.calls.append(f"drain {grace_s:g}")
        if not self.is_busy:
            self.drained.set()

    def stats(self) -> WorkerStats:
        return WorkerStats(kv_blocks_free=self.around.loaded.cache.num_blocks[0])

    def audit(self, info: WorkerInfo) -> Audit:
        raise NotImplementedError

    def cached_hashes(self) -> Sequence[BlockHash]:
        return ()

    async def close(self) -> None:
        self.calls.append("close")

    async def is_quiet(self, limit_s: float) -> bool:
        return not self.stays_at_work


@dataclass
class Rig:
    """One worker at work: its roles so far, and what it said."""

    control: WorkerControl
    task: "asyncio.Task[None]"
    roles: list[FakeRole]
    ready: list[dict[str, Any]] = field(default_factory=list)

    async def until_ready(self) -> dict[str, Any]:
        await self._until(lambda: bool(self.ready))
        return self.ready[0]

    async def change(self, config: WorkerConfig, grace_s: float = 1.0) -> dict[str, Any]:
        async with asyncio.timeout(LIMIT_S):
            return await asyncio.wrap_future(self.control.request_role(config, grace_s))

    async def ended(self) -> None:
        async with asyncio.timeout(LIMIT_S):
            await self.task

    async def until_role_says(self, call: str) -> None:
        await self._until(lambda: call in self.roles[-1].calls)

    async def until_there_are(self, num_lives: int) -> None:
        await self._until(lambda: len(self.roles) == num_lives)

    async def _until(self, holds: Callable[[], bool]) -> None:
        async def is_so() -> bool:
            return holds() or self.task.done()

        await until(is_so, LIMIT_S)
        assert holds(), self.task.exception()


Build = Callable[[WorkerContext], FakeRole]


@asynccontextmanager
async def running(config: WorkerConfig, build: Build = FakeRole) -> AsyncIterator[Rig]:
    ready: list[dict[str, Any]] = []
    control = WorkerControl(asyncio.get_running_loop(), ready.append)
    roles: list[FakeRole] = []

    def build_noted(around: WorkerContext) -> FakeRole:
        roles.append(build(around))
        return roles[-1]

    task = asyncio.create_task(run_worker(config, control, lambda role: build_noted))
    try:
        yield Rig(control, task, roles, ready)
    finally:
        control.request_stop()
        with suppress(Exception):
            await task


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def port_of(description: dict[str, Any]) -> int:
    return int(description["address"].rpartition(":")[2])


async def scrape(description: dict[str, Any]) -> str:
    url = f"http://127.0.0.1:{description['metrics_port']}/metrics"
    return (await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=60).read())).decode()


async def test_another_role_takes_over_the_same_weights_in_a_new_life(model: Path) -> None:
    """1. prefill is ready; 2. it drains for decode; 3. the same model, another incarnation, address and role."""
    async with running(config_of(model)) as rig:
        first = await rig.until_ready()
        second = await rig.change(config_of(model, "decode"))
        old, new = rig.roles
        assert old.calls == ["drain 1", "close"]
        assert new.around.loaded.model is old.around.loaded.model
        assert (first["role"], second["role"], second["worker_id"]) == ("prefill", "decode", "decode-0")
        assert (first["pid"], first["metrics_port"]) == (second["pid"], second["metrics_port"])
        assert first["incarnation"] != second["incarnation"]
        assert listens(port_of(second))
        assert first["address"] == second["address"] or not listens(port_of(first))


async def test_loads_and_changes_are_counted_in_one_scrape(model: Path) -> None:
    async with running(config_of(model)) as rig:
        first = await rig.until_ready()
        before = await scrape(first)
        assert 'pdserve_role_changes_total{model_name="tiny",role="prefill",to_role="decode"' in before
        await rig.change(config_of(model, "decode"))
        text = await scrape(await rig.change(config_of(model)))
        loads = [line for line in text.splitlines() if line.startswith("pdserve_model_loads_total")]
        assert [line.rpartition(" ")[2] for line in loads] == ["1.0"]
        changes = sorted(line for line in text.splitlines() if line.startswith("pdserve_role_changes_total{"))
        assert [line.rpartition(" ")[2] for line in changes] == ["1.0", "1.0"]
        assert "pdserve_role_change_seconds_count" in text
        totals = [line for line in text.splitlines() if line.startswith("pdserve_kv_blocks_total{")]
        assert len(totals) <= 1


async def test_a_kv_cache_of_the_same_size_is_kept_and_of_another_is_made_anew(model: Path) -> None:
    async with running(config_of(model)) as rig:
        await rig.until_ready()
        await rig.change(config_of(model, "decode"))
        await rig.change(config_of(model, num_blocks=12, block_size=8))
        first, same, other = (role.around.loaded.cache for role in rig.roles)
        assert same is first
        assert (other.num_blocks, other.block_size) == ((12,), 8)
        assert first.nbytes == 0
        assert first.layers == ()
        (group,) = rig.roles[-1].around.new_pools()
        assert (group.pool.stats().free, group.window) == (12, 0)


async def test_a_drain_that_comes_during_a_change_ends_the_worker(model: Path) -> None:
    async with running(config_of(model)) as rig:
        await rig.until_ready()
        rig.roles[0].is_busy = True
        change = asyncio.create_task(rig.change(config_of(model, "decode"), 5.0))
        await rig.until_role_says("drain 5")
        rig.control.request_drain(2.0)
        await rig.until_role_says("drain 2")
        rig.roles[0].drained.set()
        await rig.ended()
        with pytest.raises(RoleChangeFailed, match="ended before"):
            await change
        assert len(rig.roles) == 1


async def test_one_change_at_a_time_and_none_of_a_worker_that_ends(model: Path) -> None:
    async with running(config_of(model)) as rig:
        await rig.until_ready()
        rig.roles[0].is_busy = True
        first = asyncio.create_task(rig.change(config_of(model, "decode"), 5.0))
        await rig.until_role_says("drain 5")
        with pytest.raises(RoleChangeFailed, match="already"):
            await rig.change(config_of(model, "decode"))
        rig.roles[0].drained.set()
        await first
        rig.control.request_drain(0.0)
        with pytest.raises(RoleChangeFailed, match="ending"):
            await rig.change(config_of(model))


async def test_a_role_that_cannot_be_built_ends_the_worker_and_tells_who_asked(model: Path) -> None:
    def build(around: WorkerContext) -> FakeRole:
        if around.config.role == "decode":
            raise MemoryError("no room")
        return FakeRole(around)

    async with running(config_of(model), build) as rig:
        await rig.until_ready()
        with pytest.raises(RoleChangeFailed, match="ended before"):
            await rig.change(config_of(model, "decode"))
        with pytest.raises(MemoryError):
            await rig.ended()


async def test_weights_that_a_step_still_uses_are_not_given_to_another_role(model: Path) -> None:
    async with running(config_of(model)) as rig:
        await rig.until_ready()
        rig.roles[0].stays_at_work = True
        with pytest.raises(RoleChangeFailed, match="ended before"):
            await rig.change(config_of(model, "decode"))
        with pytest.raises(RoleChangeFailed, match="still computes"):
            await rig.ended()
        assert len(rig.roles) == 1


async def test_a_presence_that_cannot_start_leaves_no_server_and_no_role(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses: list[str] = []

    async def start(presence: Any) -> None:
        addresses.append(presence_address(presence))
        assert listens(int(addresses[0].rpartition(":")[2]))
        raise OSError("no presence")

    presence_address = _note_registrations(monkeypatch)
    monkeypatch.setattr("common.cluster.presence.WorkerPresence.start", start)
    async with running(config_of(model)) as rig:
        with pytest.raises(OSError, match="no presence"):
            await rig.ended()
        assert rig.roles[0].calls == ["close"]
        assert not listens(int(addresses[0].rpartition(":")[2]))


async def test_a_presence_that_fails_to_close_skips_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def close(presence: Any) -> None:
        raise OSError("Redis is odd")

    monkeypatch.setattr("common.cluster.presence.WorkerPresence.close", close)
    async with running(config_of(model)) as rig:
        description = await rig.until_ready()
        rig.control.request_drain(0.0)
        with pytest.raises(OSError, match="odd"):
            await rig.ended()
        assert rig.roles[0].calls == ["drain 0", "close"]
        assert not listens(port_of(description))
        assert not listens(description["metrics_port"])


async def test_a_metrics_port_in_use_ends_the_worker_before_anything_is_served(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        async with running(config_of(model, metrics_port=taken.getsockname()[1])) as rig:
            with pytest.raises(PdserveError, match="in use"):
                await rig.ended()
            assert rig.roles == []


async def test_a_failed_role_ends_the_worker_with_its_bug(model: Path) -> None:
    async with running(config_of(model)) as rig:
        await rig.until_ready()
        rig.roles[0].fail(AssertionError("a bug"))
        with pytest.raises(AssertionError, match="a bug"):
            await rig.ended()
        assert rig.roles[0].calls == ["close"]


def _note_registrations(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], str]:
    """The address that a presence was made with, by the presence."""
    from common.cluster.presence import WorkerPresence

    made: dict[int, str] = {}
    original: Callable[..., None] = WorkerPresence.__init__

    def init(self: WorkerPresence, url: str, namespace: str, registration: Any, **rest: Any) -> None:
        made[id(self)] = registration.address
        original(self, url, namespace, registration, **rest)

    monkeypatch.setattr(WorkerPresence, "__init__", init)
    return lambda presence: made[id(presence)]


async def test_a_frozen_life_is_followed_by_another_incarnation_around_the_same_weights(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen = asyncio.Event()
    _freeze_when(frozen, monkeypatch)
    async with running(config_of(model)) as rig:
        first = await rig.until_ready()
        frozen.set()
        await rig.until_there_are(2)
        assert rig.roles[0].calls == ["close"], "it neither drains nor answers: everybody has given it up"
        assert rig.roles[1].around.ref.worker_id == first["worker_id"]
        assert rig.roles[1].around.ref.incarnation != first["incarnation"]
        assert rig.roles[1].around.loaded.model is rig.roles[0].around.loaded.model
        text = await scrape(first)
        assert 'pdserve_lives_given_up_total{model_name="tiny",reason="frozen"' in text
        assert "pdserve_model_loads_total" in text


async def test_a_frozen_worker_that_shall_end_does_not_begin_anew(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = asyncio.Event()
    _freeze_when(frozen, monkeypatch)
    async with running(config_of(model)) as rig:
        await rig.until_ready()
        rig.control.request_stop()
        frozen.set()
        await rig.ended()
        assert len(rig.roles) == 1


async def test_a_wedged_step_ends_the_worker(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def over(*_: object) -> float:
        raise StepWedged("a step does not end")

    monkeypatch.setattr("common.worker.lifecycle.until_over", over)
    async with running(config_of(model)) as rig:
        await rig.until_ready()
        with pytest.raises(StepWedged):
            await rig.ended()
        assert [role.calls for role in rig.roles] == [["close"]]


def _freeze_when(frozen: asyncio.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first life stands still when the event is set."""
    watches = 0

    async def over(*_: object) -> float:
        nonlocal watches
        watches += 1
        await (frozen.wait() if watches == 1 else asyncio.Event().wait())
        return 9.0

    monkeypatch.setattr("common.worker.lifecycle.until_over", over)
