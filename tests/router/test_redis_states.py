"""A router and workers on a real Redis in every state that it can get into: never worse than with none at all."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from common.cluster.memory import InMemoryIndex
from common.cluster.prefix_index.mirror import PrefixIndexMirror
from common.cluster.presence import WorkerPresence
from common.cluster.protocol import Registration
from common.cluster.registry import RedisRegistry
from common.values.config import ModelConfig, RouterConfig
from router.core.generation import Finished
from router.service import RouterService
from tests.common.cluster.prefix_index.conftest import Truth, chain
from tests.redis_box import RedisBox, binaries, redis_box
from tests.router.core.kit import request
from tests.router.grpc_worker import GrpcWorker, grpc_workers
from tests.router.test_service import run
from tests.waiting import until

LEASE_S = 0.6
BLOCKS = chain("prompt", 5)
# So many looks of the router at the registry last longer than two leases.
NUM_POLLS, POLL_INTERVAL_S = 30, 0.05


class CountingRegistry(RedisRegistry):
    num_polls = 0

    async def live_workers(self) -> list[Registration] | None:
        self.num_polls += 1
        return await super().live_workers()


@dataclass
class Cluster:
    service: RouterService
    registry: CountingRegistry
    truth: Truth
    workers: dict[str, GrpcWorker]

    async def until_polled(self) -> None:
        seen = self.registry.num_polls

        async def is_over() -> bool:
            return self.registry.num_polls >= seen + NUM_POLLS

        await until(is_over)

    async def until_ready(self) -> None:
        async def is_ready() -> bool:
            return self.service.readiness().is_ready

        await until(is_ready)

    async def until_whole(self) -> None:
        """Redis lists the same lives of all workers, and knows what they cache."""
        refs = [worker.info.ref for worker in self.workers.values()]

        async def is_whole() -> bool:
            listed = {each.ref for each in await self.registry.live_workers() or []}
            found = await self.truth.longest_prefix(BLOCKS, refs)
            return listed == set(refs) and found == dict.fromkeys(refs, len(BLOCKS))

        await until(is_whole)

    async def cut_stream(self, worker_id: str) -> None:
        worker = self.workers[worker_id]
        num_lost = worker.num_routers_lost
        self.service._directory.drop(worker.info.ref, "the stream breaks", is_final=False)
        await worker.until(lambda: worker.num_routers_lost > num_lost)


@asynccontextmanager
async def cluster_on(url: str) -> AsyncIterator[Cluster]:
    unused = InMemoryIndex()
    config = RouterConfig(model=ModelConfig(path="tiny"), worker_silence_s=600.0)
    async with AsyncExitStack() as stack:
        workers = await stack.enter_async_context(grpc_workers(unused, "p0", "d0"))
        for registration in await unused.live_workers() or []:
            presence = WorkerPresence(url, "ns", registration, lease_s=LEASE_S, snapshot=lambda: BLOCKS)
            await presence.start()
            stack.push_async_callback(presence.close)
        index = PrefixIndexMirror(url, "ns")
        registry = CountingRegistry(url, "ns")
        service = RouterService(config, index, registry)
        index.start()
        await service.start()
        for owner in (registry, index, service):
            stack.push_async_callback(owner.close)
        yield Cluster(service, registry, Truth(url, "ns"), workers)


def evict(client: redis.Redis) -> None:
    client.config_set("maxmemory-policy", "allkeys-lru")
    client.config_set("maxmemory", 1)


def fill(client: redis.Redis) -> None:
    client.config_set("maxmemory-policy", "noeviction")
    client.config_set("maxmemory", 1)


def has_room(client: redis.Redis) -> None:
    client.config_set("maxmemory", 0)


def delete(client: redis.Redis) -> None:
    """As often as a worker could write: nothing of them is ever there for long."""
    client.execute_command("ACL", "SETUSER", "default", "-evalsha")
    client.flushall()


Step = Callable[[redis.Redis], object]
STATES: dict[str, tuple[Step, Step]] = {
    "read-only": (lambda client: client.replicaof("127.0.0.1", "1"), lambda client: client.replicaof("NO", "ONE")),
    "read-only and empty": (
        lambda client: (client.flushall(), client.replicaof("127.0.0.1", "1")),
        lambda client: client.replicaof("NO", "ONE"),
    ),
    "without replicas that it must have": (
        lambda client: client.config_set("min-replicas-to-write", 3),
        lambda client: client.config_set("min-replicas-to-write", 0),
    ),
    "evicting": (evict, has_room),
    "full": (fill, has_room),
    "full and empty": (lambda client: (fill(client), client.flushall()), has_room),
    "refusing scripts": (delete, lambda client: client.execute_command("ACL", "SETUSER", "default", "+evalsha")),
    "slow": (lambda client: client.client_pause(2000), lambda client: client.ping()),
}


@pytest.fixture
def own_box(tmp_path: Path) -> Iterator[RedisBox]:
    with redis_box(binaries()[0], tmp_path) as server:
        yield server


async def check(cluster: Cluster, begin: Callable[[], object], end: Callable[[], object]) -> None:
    """1. All is well. 2. The state begins and outlasts every lease: requests are served. 3. A stream breaks meanwhile
    and is opened again. 4. The state ends: the same lives are listed again, with what they cache."""
    await cluster.until_ready()
    await cluster.until_whole()
    begin()
    await cluster.until_polled()
    assert isinstance((await run(cluster.service, request("during")))[-1], Finished)
    await cluster.cut_stream("d0")
    await cluster.until_ready()
    assert isinstance((await run(cluster.service, request("after a cut")))[-1], Finished)
    end()
    await cluster.until_whole()
    assert isinstance((await run(cluster.service, request("healed")))[-1], Finished)


@pytest.mark.parametrize("state", STATES)
async def test_requests_are_served_while_redis_is(
    own_box: RedisBox, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.registry.POLL_INTERVAL_S", POLL_INTERVAL_S)
    begin, end = STATES[state]
    client = own_box.client()
    async with cluster_on(own_box.url) as cluster:
        await check(cluster, lambda: begin(client), lambda: end(client))


async def test_requests_are_served_while_redis_is_gone(own_box: RedisBox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.registry.POLL_INTERVAL_S", POLL_INTERVAL_S)
    async with cluster_on(own_box.url) as cluster:
        await check(cluster, own_box.kill, own_box.start_again)
