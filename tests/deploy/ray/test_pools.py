"""Pools of real Ray actors around fake workers: sizes follow Redis, the dead are replaced, nothing is left."""

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from common.cluster.pools import PoolStore
from common.values.config import ClusterConfig, ModelConfig, PoolSettings
from deploy.process.session import session
from deploy.ray.local import local_ray
from deploy.ray.placement import LocalPlacement
from deploy.ray.pools import RayPools
from tests.redis_box import RedisBox, binaries, redis_box
from tests.waiting import until

pytestmark = pytest.mark.cluster

FAKE = "tests.deploy.ray.fake_worker:FakeWorker"
# Starting a process that imports Ray takes seconds when others use the cores too.
LIMIT_S = 90.0


@pytest.fixture(scope="module")
def ray() -> Iterator[None]:
    with session() as opened, local_ray(opened.runtime_dir):
        yield


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisBox]:
    with redis_box(binaries()[0], tmp_path_factory.mktemp("redis")) as server:
        yield server


class Rig:
    """Pools at work, and what they reported."""

    def __init__(self, config: ClusterConfig) -> None:
        self.reports: list[tuple[str, str]] = []
        self.pools = RayPools(config, self._report, LocalPlacement(config, Path(), FAKE))
        self.store = PoolStore(config.redis_url, config.namespace)

    def _report(self, who: str, what: str) -> None:
        self.reports.append((who, what))

    async def until_sizes(self, prefill: int, decode: int) -> None:
        """Wait until exactly so many are ready and none is starting or leaving."""

        async def are_so() -> bool:
            statuses = self.pools.status()
            return all(status.is_still for status in statuses) and [s.ready for s in statuses] == [prefill, decode]

        await until(are_so, LIMIT_S)

    def pids(self, worker_id: str) -> list[int]:
        """Of all lives of the worker, in order."""
        texts = [what for who, what in self.reports if who == worker_id]
        return [int(found[1]) for text in texts if (found := re.search(r"pid (\d+)", text))]


@asynccontextmanager
async def running(box: RedisBox, namespace: str, prefill: int, decode: int, path: str = "x") -> AsyncIterator[Rig]:
    sizes = PoolSettings(prefill=prefill, decode=decode, drain_grace_s=0.5)
    rig = Rig(ClusterConfig(redis_url=box.url, namespace=namespace, model=ModelConfig(path=path), pools=sizes))
    controller = asyncio.create_task(rig.pools.run(rig.store))
    try:
        yield rig
        async with asyncio.timeout(LIMIT_S):
            await rig.pools.empty()
        for worker_id in {who for who, _ in rig.reports}:
            for pid in rig.pids(worker_id):
                await until(lambda pid=pid: _is_gone(pid), LIMIT_S)  # type: ignore[misc]
    finally:
        controller.cancel()
        await asyncio.gather(controller, return_exceptions=True)
        await rig.store.withdraw()
        await rig.store.close()


async def _is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def test_sizes_follow_redis_up_and_down(ray: None, box: RedisBox) -> None:
    """1. 1+1; 2. somebody asks for 2+1; 3. then for 1+1: the second prefill worker drains and is gone."""
    async with running(box, "sizes", prefill=1, decode=1) as rig:
        await rig.until_sizes(1, 1)
        assert await rig.store.get_desired() == {"prefill": 1, "decode": 1}
        await rig.store.set_desired({"prefill": 2})
        await rig.until_sizes(2, 1)
        status = await rig.store.get_status()
        assert status is not None
        assert status["prefill"]["desired"] == 2
        await rig.store.set_desired({"prefill": 1})
        await rig.until_sizes(1, 1)
        assert [what for who, what in rig.reports if who == "prefill-1"][-2:] == ["draining", "ended"]


async def test_a_shift_of_the_mix_changes_a_role_and_starts_no_process(ray: None, box: RedisBox) -> None:
    """1. 2+1; 2. somebody asks for 1+2: prefill-1 becomes decode-1 in the same process; 3. and back."""
    async with running(box, "shift", prefill=2, decode=1) as rig:
        await rig.until_sizes(2, 1)
        pids = {pid for worker_id in ("prefill-0", "prefill-1", "decode-0") for pid in rig.pids(worker_id)}
        await rig.store.set_desired({"prefill": 1, "decode": 2})
        await rig.until_sizes(1, 2)
        assert rig.pids("decode-1") == [rig.pids("prefill-1")[-1]] or rig.pids("decode-1") == rig.pids("prefill-0")
        await rig.store.set_desired({"prefill": 2, "decode": 1})
        await rig.until_sizes(2, 1)
        ids = [f"{role}-{number}" for role in ("prefill", "decode") for number in (0, 1)]
        assert {pid for worker_id in ids for pid in rig.pids(worker_id)} == pids
        assert [status.num_changes for status in rig.pools.status()] == [1, 1]
        status = await rig.store.get_status()
        assert status is not None
        assert status["decode"]["change_problem"] == ""


async def test_a_worker_that_gets_sigterm_drains_and_is_replaced_and_has_not_crashed(ray: None, box: RedisBox) -> None:
    async with running(box, "sigterm", prefill=0, decode=1) as rig:
        await rig.until_sizes(0, 1)
        os.kill(rig.pids("decode-0")[0], signal.SIGTERM)

        async def is_replaced() -> bool:
            return len(rig.pids("decode-0")) == 2

        await until(is_replaced, LIMIT_S)
        assert ("decode-0", "has drained and ended, as it was asked; its pool replaces it") in rig.reports
        assert rig.pools.status()[1].num_crashes == 0


async def test_a_killed_actor_is_replaced_by_a_new_process_and_the_reason_is_told(
    ray: None, box: RedisBox, capfd: pytest.CaptureFixture[str]
) -> None:
    """In one line: the text that Ray prints to its starter reaches no terminal."""
    async with running(box, "killed", prefill=0, decode=1) as rig:
        await rig.until_sizes(0, 1)
        os.kill(rig.pids("decode-0")[0], signal.SIGKILL)

        async def is_replaced() -> bool:
            return len(rig.pids("decode-0")) == 2

        await until(is_replaced, LIMIT_S)
        assert len(set(rig.pids("decode-0"))) == 2
        assert any(what.startswith("ended: its process died: ") for _, what in rig.reports)
        assert rig.pools.status()[1].num_crashes == 1
    assert capfd.readouterr() == ("", "")


async def test_a_frozen_actor_is_ended_and_replaced(ray: None, box: RedisBox, monkeypatch: pytest.MonkeyPatch) -> None:
    """1. SIGSTOP for good; 2. Ray still sees a process; 3. it is killed, and another takes its place."""
    monkeypatch.setattr("deploy.ray.pools.WAIT_S", 0.2)
    monkeypatch.setattr("deploy.ray.pools.SILENCE_S", 5.0)
    async with running(box, "frozen", prefill=0, decode=1) as rig:
        await rig.until_sizes(0, 1)
        os.kill(rig.pids("decode-0")[0], signal.SIGSTOP)

        async def is_replaced() -> bool:
            return len(rig.pids("decode-0")) == 2

        await until(is_replaced, LIMIT_S)
        await until(lambda: _is_gone(rig.pids("decode-0")[0]), LIMIT_S)
        assert ("decode-0", "ended: it has not answered for 5 s") in rig.reports


async def test_a_worker_that_does_not_start_is_told_with_its_reason(ray: None, box: RedisBox) -> None:
    async with running(box, "fails", prefill=0, decode=1, path="fails") as rig:

        async def has_crashed_twice() -> bool:
            return rig.pools.status()[1].num_crashes >= 2

        await until(has_crashed_twice, LIMIT_S)
        assert rig.pools.status()[1].last_failure == "decode-0: ValueError: no such model"
        assert rig.pools.status()[1].retry_in_s > 0


async def test_a_worker_that_ignores_its_drain_is_killed(
    ray: None, box: RedisBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.scaling.pools.KILL_MARGIN_S", 0.1)
    async with running(box, "stubborn", prefill=0, decode=1, path="stubborn") as rig:
        await rig.until_sizes(0, 1)
        await rig.store.set_desired({"decode": 0})
        await rig.until_sizes(0, 0)


async def test_workers_share_the_cores_and_stay_on_loopback(ray: None, box: RedisBox, tmp_path: Path) -> None:
    async with running(box, "environment", prefill=1, decode=0, path=str(tmp_path)) as rig:
        await rig.until_sizes(1, 0)
        environment = (tmp_path / "prefill-0").read_text().splitlines()
        assert "GLOO_SOCKET_IFNAME=lo" in environment
        assert "OMP_WAIT_POLICY=PASSIVE" in environment
        assert any(line.startswith("OMP_NUM_THREADS=") for line in environment)
        assert _listeners_beyond_loopback(os.getpid()) == []


def _listeners_beyond_loopback(root_pid: int) -> list[str]:
    """Sockets of ours and of all that we started which others than this machine could reach."""
    root = psutil.Process(root_pid)
    found = []
    for process in (root, *root.children(recursive=True)):
        try:
            listening = [c for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
        except psutil.NoSuchProcess:
            continue
        ours = [c.laddr for c in listening if not c.laddr.ip.removeprefix("::ffff:").startswith("127.")]
        found += [f"{process.name()} {address}" for address in ours]
    return found
