"""The autoscaler's shell: what a router says becomes sizes in Redis; who is away changes nothing."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from common.cluster.pools import PoolStore
from common.values.config import AutoscaleSettings
from common.values.errors import PdserveError
from common.values.messages import Role
from deploy.client.admin import AdminClient, AdminFailed
from deploy.scaling.autoscale_loop import MAX_SILENT_S, AutoscaleLoop, pool_load
from deploy.scaling.autoscaler import WorkerLoad
from tests.redis_box import RedisBox, binaries, redis_box
from tests.waiting import until

SETTINGS = AutoscaleSettings(up_window_s=0, up_cooldown_s=0, decode_max=3)


def worker(role: str, state: str = "ready", **load: float) -> dict[str, Any]:
    """As `/admin/v1/state` shows one."""
    names = ("running", "waiting", "waiting_uncached_tokens", "kv_blocks_used", "kv_blocks_held")
    idle = {**dict.fromkeys(names, 0), "kv_blocks_total": 100, "max_num_seqs": 8, "step_s": 0.0}
    return {"role": role, "state": state, **idle, "prefill_tokens_per_s": 0.0, **load}


def queued(*lengths: int) -> list[dict[str, int]]:
    """The routers of a cluster, by their queues."""
    return [{"num_queued": length} for length in lengths]


class ScriptedClient(AdminClient):
    """A router that says what the test wants; None = it is away."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:1")
        self.answer: dict[str, Any] | None = None

    def state(self) -> dict[str, Any]:
        if self.answer is None:
            raise AdminFailed("nothing answers")
        return self.answer


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisBox]:
    with redis_box(binaries()[0], tmp_path_factory.mktemp("redis")) as server:
        yield server


class Rig:
    def __init__(self, redis_url: str, namespace: str) -> None:
        self.store, self.client = PoolStore(redis_url, namespace), ScriptedClient()
        self.reports: list[str] = []
        away = ScriptedClient()
        routers = [away, self.client]
        self.loop = AutoscaleLoop(SETTINGS, routers, lambda who, what: self.reports.append(f"{who}: {what}"))

    async def until_desired(self, role: str, size: int) -> None:
        async def is_so() -> bool:
            sizes = await self.store.get_desired()
            return sizes is not None and sizes[role] == size

        await until(is_so)

    async def until_problem(self, text: str) -> None:
        async def is_so() -> bool:
            return text in str(self.loop.status()["decode"]["problem"])

        await until(is_so)


@asynccontextmanager
async def running(box: RedisBox, namespace: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    monkeypatch.setattr("deploy.scaling.autoscale_loop.INTERVAL_S", 0.01)
    rig = Rig(box.url, namespace)
    task = asyncio.create_task(rig.loop.run(rig.store))
    try:
        yield rig
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await rig.store.close()


async def test_a_loaded_pool_gets_another_size_and_the_reason_is_told(
    box: RedisBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(box, "loaded", monkeypatch) as rig:
        await rig.store.announce({"prefill": 1, "decode": 1}, {})
        rig.client.answer = {"workers": [worker("prefill"), worker("decode", running=8)], "routers": queued(2, 3)}
        await rig.until_desired("decode", 2)
        assert await rig.store.get_desired() == {"prefill": 1, "decode": 2}
        assert rig.reports[0].startswith("autoscaler: decode 1 -> 2: for 0 s at least: 13 sequences, 5 of them queued")
        assert rig.loop.status()["prefill"]["reason"] == (
            "1 fits: 0 uncached tokens wait at 0 tokens/s a worker for a TTFT of 2 s, 0 of 1 busy"
        )


async def test_a_router_or_a_controller_that_is_away_changes_nothing_and_is_told(
    box: RedisBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(box, "away", monkeypatch) as rig:
        await rig.until_problem("nothing answers")
        rig.client.answer = {"workers": [worker("decode", running=8)], "routers": queued(50)}
        await rig.until_problem("the pool sizes cannot be read")
        assert await rig.store.get_desired() is None
        await rig.store.announce({"prefill": 1, "decode": 1}, {})
        await rig.until_desired("decode", 3)
        assert rig.reports


def test_the_load_is_that_of_ready_workers_and_the_queues_of_all_routers_are_decodes() -> None:
    loaded = worker("decode", running=2, waiting=1, kv_blocks_used=30, kv_blocks_held=10, step_s=0.02)
    state = {"workers": [loaded, worker("decode", "draining"), worker("prefill")], "routers": queued(4, 0, 3)}
    load = pool_load(state, Role.DECODE, 4)
    assert (load.size, load.num_queued) == (4, 7)
    assert load.workers == (WorkerLoad(2, 1, 0, 40, 100, 8, 0.0, 0.02),)
    assert pool_load(state, Role.PREFILL, 1).num_queued == 0


def test_a_worker_that_was_silent_for_long_does_not_report() -> None:
    workers = [worker("decode", silent_s=age_s) for age_s in (0.2, MAX_SILENT_S + 1, float("nan"), -1.0)]
    load = pool_load({"workers": workers, "routers": []}, Role.DECODE, 4)
    assert (len(load.workers), load.blindness) == (1, "blind: 1 of 4 workers report")


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"workers": None, "routers": []},
        {"workers": [{}], "routers": []},
        {"workers": ["prefill"], "routers": []},
        {"workers": [], "routers": [{"num_queued": "many"}]},
        {"workers": [{"role": "decode", "state": "ready", "silent_s": "long"}], "routers": []},
        {"workers": [{"role": "decode", "state": "ready"}], "routers": []},
    ],
)
def test_a_state_that_makes_no_sense_is_an_error_of_its_own(state: dict[str, Any]) -> None:
    with pytest.raises(PdserveError, match="the router's state makes no sense"):
        pool_load(state, Role.DECODE, 1)


async def test_a_pool_without_reports_is_held_and_said_to_be_blind_once(
    box: RedisBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows of nothing: a pool that is idle shrinks at the first look."""
    settings = AutoscaleSettings(stable_window_s=0, down_cooldown_s=0)
    monkeypatch.setattr("tests.deploy.scaling.test_autoscale_loop.SETTINGS", settings)
    async with running(box, "blind", monkeypatch) as rig:
        await rig.store.announce({"prefill": 2, "decode": 2}, {})

        async def is_blind() -> bool:
            return len(rig.reports) == 2

        rig.client.answer = {"workers": [worker("prefill")], "routers": queued(0)}
        await until(is_blind)
        assert rig.reports == [
            "autoscaler: prefill is held, blind: 1 of 2 workers report",
            "autoscaler: decode is held, blind: 0 of 2 workers report",
        ]
        assert "held, blind: 0 of 2 workers report" in str(rig.loop.status()["decode"]["reason"])
        assert await rig.store.get_desired() == {"prefill": 2, "decode": 2}
        rig.client.answer = {"workers": [worker("prefill")] * 2 + [worker("decode")] * 2, "routers": queued(0)}
        await rig.until_desired("decode", 1)
        assert "autoscaler: decode: all workers report again" in rig.reports
