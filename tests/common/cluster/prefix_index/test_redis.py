"""Registry and index on a real server, all well."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from common.cluster.keys import Keys
from common.cluster.prefix_index.writer import RedisIndexWriter
from common.cluster.presence import WorkerPresence
from common.cluster.registry import Lease, RedisRegistry
from common.values.ids import BlockHash, WorkerRef
from common.values.messages import Role
from tests.common.cluster.prefix_index.conftest import Truth, chain, registration
from tests.redis_box import RedisBox
from tests.waiting import until


class Worker:
    """A lease and a writer, driven by hand; `blocks` is its pool."""

    def __init__(self, stack: AsyncExitStack, url: str, namespace: str, ref: WorkerRef, lease_s: float = 30.0) -> None:
        self.ref = ref
        self.blocks: list[BlockHash] = []
        self.lease = Lease(url, namespace, registration(*ref), lease_s)
        self.writer = RedisIndexWriter(url, namespace, ref, lease_s, lambda: self.blocks)
        stack.push_async_callback(self.lease.close)
        stack.push_async_callback(self.writer.close)

    async def store(self, hashes: Sequence[BlockHash]) -> None:
        self.blocks += hashes
        self.writer.publish(hashes, [])
        await self.writer.flush()


class Cluster:
    def __init__(self, stack: AsyncExitStack, url: str, namespace: str) -> None:
        self._stack, self._url, self.namespace = stack, url, namespace
        self.truth = Truth(url, namespace)
        self.registry = RedisRegistry(url, namespace)
        stack.push_async_callback(self.truth.close)
        stack.push_async_callback(self.registry.close)

    async def worker(self, worker_id: str, incarnation: str = "a", lease_s: float = 30.0) -> Worker:
        worker = Worker(self._stack, self._url, self.namespace, WorkerRef(worker_id, incarnation), lease_s)
        assert await worker.lease.renew()
        await worker.writer.flush()
        return worker


@asynccontextmanager
async def cluster_on(url: str, namespace: str) -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        yield Cluster(stack, url, namespace)


@pytest.fixture
async def cluster(box: RedisBox, request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    async with cluster_on(box.url, request.node.originalname) as made:
        yield made


async def test_lookup_finds_the_longest_prefix_of_every_length(cluster: Cluster) -> None:
    worker = await cluster.worker("p0")
    prompt = chain("prompt", 9)
    for held in range(1, 10):
        await worker.store([prompt[held - 1]])
        for asked in range(1, 10):
            found = await cluster.truth.longest_prefix(prompt[:asked], [worker.ref])
            assert found == {worker.ref: min(held, asked)}


async def test_lookup_answers_for_each_worker_and_omits_those_without(cluster: Cluster) -> None:
    first, second, third = [await cluster.worker(f"p{idx}") for idx in range(3)]
    prompt = chain("prompt", 40)
    await first.store(prompt[:7])
    await third.store(prompt)
    found = await cluster.truth.longest_prefix(prompt, [first.ref, second.ref, third.ref])
    assert found == {first.ref: 7, third.ref: 40}


async def test_evicted_blocks_are_gone_and_stored_again_are_back(cluster: Cluster) -> None:
    worker = await cluster.worker("p0")
    prompt = chain("prompt", 6)
    await worker.store(prompt)
    worker.writer.publish([], prompt[4:])
    await worker.writer.flush()
    assert await cluster.truth.longest_prefix(prompt, [worker.ref]) == {worker.ref: 4}
    worker.writer.publish(prompt[4:], [])
    await worker.writer.flush()
    assert await cluster.truth.longest_prefix(prompt, [worker.ref]) == {worker.ref: 6}


async def test_last_word_on_a_block_counts_when_batches_were_pending(cluster: Cluster) -> None:
    worker = await cluster.worker("p0")
    kept, dropped = chain("kept", 1), chain("dropped", 1)
    worker.writer.publish([*kept, *dropped], [])
    worker.writer.publish([], [*kept, *dropped])
    worker.writer.publish(kept, [])
    await worker.writer.flush()
    assert await cluster.truth.longest_prefix(kept, [worker.ref]) == {worker.ref: 1}
    assert await cluster.truth.longest_prefix(dropped, [worker.ref]) == {}


async def test_more_blocks_than_one_batch_arrive(cluster: Cluster) -> None:
    worker = await cluster.worker("p0")
    prompt = chain("long", 10_000)
    await worker.store(prompt)
    assert await cluster.truth.longest_prefix(prompt, [worker.ref]) == {worker.ref: 10_000}
    assert worker.writer.counts.num_batches == 3


async def test_too_much_pending_turns_into_a_resync_with_the_same_result(box: RedisBox) -> None:
    async with cluster_on(box.url, "overflow") as cluster:
        worker = await cluster.worker("p0")
        worker.writer._max_pending = 10
        prompt = chain("prompt", 25)
        await worker.store(prompt)
        assert await cluster.truth.longest_prefix(prompt, [worker.ref]) == {worker.ref: 25}
        assert worker.writer.counts.num_resyncs == 2


async def test_a_dead_workers_late_batch_is_ignored(cluster: Cluster) -> None:
    worker = await cluster.worker("p0")
    await worker.store(chain("prompt", 3))
    await worker.lease.deregister()
    await worker.store(chain("late", 3))
    assert await cluster.truth.longest_prefix(chain("prompt", 3), [worker.ref]) == {}
    assert await cluster.truth.longest_prefix(chain("late", 3), [worker.ref]) == {}


async def test_a_worker_whose_lease_ended_changes_nothing_until_it_registers_again(
    box: RedisBox, cluster: Cluster
) -> None:
    """Its set and its number are still there: only the lease tells that it is dead."""
    worker = await cluster.worker("p0")
    prompt, late = chain("prompt", 3), chain("late", 3)
    await worker.store(prompt)
    box.client().delete(Keys(cluster.namespace).lease(worker.ref))
    await worker.store(late)
    await worker.writer.flush()
    assert box.client().scard(Keys(cluster.namespace).members(worker.ref)) == 3
    assert await cluster.truth.longest_prefix(prompt, [worker.ref]) == {}
    assert await worker.lease.renew()
    await worker.writer.flush()
    assert await cluster.truth.longest_prefix(late, [worker.ref]) == {worker.ref: 3}


async def test_a_batch_that_was_on_its_way_during_a_resync_is_not_applied_afterwards(cluster: Cluster) -> None:
    worker = await cluster.worker("p0")
    prompt = chain("prompt", 4)
    worker.blocks = list(prompt)
    overtaken = worker.writer._sequence
    worker.writer._start_over()
    await worker.writer._resync()
    current, worker.writer._sequence = worker.writer._sequence, overtaken
    assert await worker.writer._call_apply([], prompt) < 0
    worker.writer._sequence = current
    await worker.writer.flush()
    assert await cluster.truth.longest_prefix(prompt, [worker.ref]) == {worker.ref: 4}


async def test_a_new_incarnation_starts_with_nothing_of_the_old_one(cluster: Cluster) -> None:
    old = await cluster.worker("p0", "old")
    prompt = chain("prompt", 3)
    await old.store(prompt)
    new = await cluster.worker("p0", "new")
    assert await cluster.truth.longest_prefix(prompt, [new.ref]) == {}
    assert await cluster.truth.longest_prefix(prompt, [old.ref]) == {old.ref: 3}


async def test_duplicate_and_reordered_batches_change_nothing(cluster: Cluster) -> None:
    """A batch with another number than the next one is refused, and the writer sends its pool anew."""
    worker = await cluster.worker("p0")
    prompt = chain("prompt", 4)
    await worker.store(prompt)
    worker.writer._sequence -= 1  # as after an answer that was lost
    worker.writer.publish([], prompt)
    await worker.writer.flush()
    assert worker.writer.counts.num_resyncs == 1
    assert await cluster.truth.longest_prefix(prompt, [worker.ref]) == {worker.ref: 4}
    await worker.writer.flush()
    assert worker.writer.counts.num_resyncs == 2
    assert await cluster.truth.longest_prefix(prompt, [worker.ref]) == {worker.ref: 4}


async def test_registry_lists_live_workers_and_forgets_the_others(cluster: Cluster) -> None:
    first, second = await cluster.worker("p0"), await cluster.worker("p1")
    assert await cluster.registry.live_workers() is not None
    assert {live.ref for live in await cluster.registry.live_workers() or []} == {first.ref, second.ref}
    await first.lease.deregister()
    assert [live.ref for live in await cluster.registry.live_workers() or []] == [second.ref]


async def test_registry_keeps_role_and_address(cluster: Cluster) -> None:
    await cluster.worker("p0")
    assert await cluster.registry.live_workers() == [registration("p0", role=Role.PREFILL)]


async def test_a_crashed_workers_keys_expire_by_themselves(box: RedisBox, cluster: Cluster) -> None:
    """No deregistration: lease, blocks and number all go, without anybody scanning."""
    worker = await cluster.worker("p0", lease_s=30.0)
    await worker.store(chain("prompt", 5))
    client = box.client()
    keys = Keys(cluster.namespace)
    names = [keys.lease(worker.ref), keys.members(worker.ref), keys.sequence(worker.ref)]
    assert client.exists(*names) == 3
    left_ms = [client.pttl(name) for name in names]
    assert all(0 < each <= 30_000 for each in left_ms)
    for name, each in zip(names, left_ms, strict=True):
        client.pexpire(name, max(1, each - 30_000))  # as if the lease had gone by

    async def are_gone() -> bool:
        return client.exists(*names) == 0

    await until(are_gone)
    assert await cluster.registry.live_workers() == []


async def test_every_key_has_a_time_to_live_and_their_number_does_not_grow(box: RedisBox, cluster: Cluster) -> None:
    """20 000 prompts pass through a pool of 32 blocks."""
    worker = await cluster.worker("p0")
    live: list[BlockHash] = []
    for idx in range(0, 20_000, 100):
        stored = chain(f"prompt {idx}", 100)
        live += stored
        evicted, live = live[:-32], live[-32:]
        worker.writer.publish([block for block in stored if block in live], evicted)
        await worker.writer.flush()
    client = box.client()
    names = list(client.scan_iter(f"{cluster.namespace}*"))
    assert len(names) == 4
    assert all(client.pttl(name) > 0 for name in names)
    assert client.scard(Keys(cluster.namespace).members(worker.ref)) == 32


async def test_presence_registers_publishes_and_gives_the_lease_back(box: RedisBox) -> None:
    async with cluster_on(box.url, "presence") as cluster:
        prompt = chain("prompt", 3)
        who = registration("d0", role=Role.DECODE)
        presence = WorkerPresence(box.url, "presence", who, lease_s=1.0, snapshot=lambda: prompt[:1])
        await presence.start()
        assert await cluster.registry.live_workers() == [who]

        async def holds(num_blocks: int) -> bool:
            return await cluster.truth.longest_prefix(prompt, [who.ref]) == {who.ref: num_blocks}

        await until(lambda: holds(1))
        presence.publish(prompt[1:], [])
        await until(lambda: holds(3))
        await presence.close()
        assert await cluster.registry.live_workers() == []


async def test_presence_without_redis_is_silent() -> None:
    presence = WorkerPresence("", "none", registration("d0"), lease_s=1.0, snapshot=lambda: [])
    await presence.start()
    presence.publish(chain("prompt", 3), [])
    await presence.close()
