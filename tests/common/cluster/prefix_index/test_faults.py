"""Registry and index when Redis is away, silent, wiped, full or poisoned: slower routing, nothing else."""

import asyncio
import json
import pickle
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from common.cluster.keys import MEMBER_BYTES, Keys
from common.cluster.prefix_index.writer import RedisIndexWriter
from common.cluster.presence import RedisIndexReader, RedisRegistry, WorkerPresence
from common.cluster.redis import REDIS_ERRORS
from common.cluster.registry import Lease, decode, encode
from common.values.ids import BlockHash, WorkerRef
from tests.common.cluster.prefix_index.conftest import chain, registration
from tests.redis_box import RedisBox, binaries, redis_box
from tests.tcp_proxy import tcp_proxy
from tests.waiting import until

WHO = registration("p0")
PROMPT = chain("prompt", 12)


class Clock:
    """Time of the reader's circuit breaker."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
async def presence(own_box: RedisBox) -> AsyncIterator[WorkerPresence]:
    """A live worker on `own_box` that holds PROMPT, with a lease short enough to see it end."""
    made = WorkerPresence(own_box.url, "ns", WHO, lease_s=1.5, snapshot=lambda: PROMPT)
    await made.start()
    yield made
    await made.close()


async def wait_until_found(reader: RedisIndexReader, num_blocks: int) -> None:
    async def is_found() -> bool:
        return await reader.longest_prefix(PROMPT, [WHO.ref]) == {WHO.ref: num_blocks}

    await until(is_found)


async def test_no_redis_answers_nothing_and_stops_asking_after_three_failures(tmp_path: Path) -> None:
    with redis_box(binaries()[0], tmp_path) as box:
        box.kill()
        clock = Clock()
        told: list[None] = []
        reader = RedisIndexReader(box.url, "ns", clock=clock, on_failed=lambda: told.append(None))
        for _ in range(50):
            assert await reader.longest_prefix(PROMPT, [WHO.ref]) == {}
        assert (reader.counts.num_failed, reader.counts.num_skipped) == (3, 47)
        assert reader.is_degraded
        clock.now_s = 1.5  # one trial per second
        for _ in range(10):
            assert await reader.longest_prefix(PROMPT, [WHO.ref]) == {}
        assert (reader.counts.num_failed, reader.counts.num_skipped) == (4, 56)
        assert len(told) == 4
        await reader.close()


async def test_registry_without_redis_says_that_it_does_not_know(own_box: RedisBox) -> None:
    own_box.kill()
    registry = RedisRegistry(own_box.url, "ns")
    assert await registry.live_workers() is None
    await registry.close()


async def test_a_silent_redis_costs_no_more_than_the_budget(own_box: RedisBox) -> None:
    async with tcp_proxy(own_box.port) as proxy:
        reader = RedisIndexReader(own_box.url_through(proxy.port), "ns")
        await reader.longest_prefix(PROMPT, [WHO.ref])
        proxy.is_silent = True
        # Three budgets of 50 ms, where the default client would retry for 20 s on each.
        async with asyncio.timeout(20.0):
            for _ in range(50):
                assert await reader.longest_prefix(PROMPT, [WHO.ref]) == {}
        assert proxy.num_bytes_swallowed > 0
        assert reader.counts.num_failed == 3
        await reader.close()


async def test_index_and_registry_refill_after_redis_lost_everything(
    own_box: RedisBox, presence: WorkerPresence
) -> None:
    reader, registry = RedisIndexReader(own_box.url, "ns", budget_s=5.0), RedisRegistry(own_box.url, "ns")
    await wait_until_found(reader, len(PROMPT))
    own_box.kill()
    assert await reader.longest_prefix(PROMPT, [WHO.ref]) == {}
    presence.publish(chain("meanwhile", 3), [])
    own_box.start_again()
    await wait_until_found(reader, len(PROMPT))
    assert await registry.live_workers() == [WHO]
    await reader.close()
    await registry.close()


async def test_nothing_piles_up_in_a_worker_while_redis_is_away(own_box: RedisBox) -> None:
    own_box.kill()
    writer = RedisIndexWriter(own_box.url, "ns", WHO.ref, 30.0, lambda: PROMPT)
    with pytest.raises(REDIS_ERRORS):
        await writer.flush()
    for idx in range(100):
        writer.publish(chain(f"prompt {idx}", 10), [])
    assert len(writer._pending) == 0
    await writer.close()


async def test_a_wiped_redis_refills_although_the_worker_is_idle(own_box: RedisBox, presence: WorkerPresence) -> None:
    reader = RedisIndexReader(own_box.url, "ns", budget_s=5.0)
    await wait_until_found(reader, len(PROMPT))
    own_box.client().flushall()
    await wait_until_found(reader, len(PROMPT))
    await reader.close()


async def test_lost_writes_are_found_and_the_index_is_the_truth_again(
    own_box: RedisBox, presence: WorkerPresence
) -> None:
    """As after a failover to a replica that lagged: fewer blocks, an older number."""
    reader = RedisIndexReader(own_box.url, "ns", budget_s=5.0)
    await wait_until_found(reader, len(PROMPT))
    keys, client = Keys("ns"), own_box.client()
    client.srem(keys.members(WHO.ref), *[block_hash[:MEMBER_BYTES] for block_hash in PROMPT[6:]])
    client.decr(keys.sequence(WHO.ref))
    assert await reader.longest_prefix(PROMPT, [WHO.ref]) == {WHO.ref: 6}
    await wait_until_found(reader, len(PROMPT))
    await reader.close()


async def test_a_full_redis_refuses_additions_but_takes_removals(own_box: RedisBox) -> None:
    client = own_box.client()
    lease = Lease(own_box.url, "ns", WHO, 30.0)
    pool: list[BlockHash] = []
    writer = RedisIndexWriter(own_box.url, "ns", WHO.ref, 30.0, lambda: pool)
    reader = RedisIndexReader(own_box.url, "ns", budget_s=5.0)
    await lease.renew()
    await writer.flush()
    writer.publish(PROMPT, [])
    await writer.flush()
    client.config_set("maxmemory", 1)
    writer.publish(chain("more", 5), PROMPT[8:])
    await writer.flush()
    assert writer.counts.num_dropped == 5
    assert await reader.longest_prefix(PROMPT, [WHO.ref]) == {WHO.ref: 8}
    assert await lease.renew()
    # Room again: the whole pool is sent once the pause is over.
    client.config_set("maxmemory", 0)
    pool = chain("more", 5)
    writer._retry_dropped_s = 0.0
    await writer.flush()
    assert await reader.longest_prefix(chain("more", 5), [WHO.ref]) == {WHO.ref: 5}
    for resource in (lease, writer, reader):
        await resource.close()


async def test_cancelled_lookups_never_get_the_answer_of_another(own_box: RedisBox) -> None:
    """Replies are slow and half of the callers leave; the depth that comes back must be the asked prompt's own."""
    lease = Lease(own_box.url, "ns", WHO, 30.0)
    prompts = {num_blocks: chain(f"prompt {num_blocks}", num_blocks) for num_blocks in range(1, 41)}
    pool = [block_hash for prompt in prompts.values() for block_hash in prompt]
    writer = RedisIndexWriter(own_box.url, "ns", WHO.ref, 30.0, lambda: pool)
    await lease.renew()
    await writer.flush()
    rng = random.Random(9)
    async with tcp_proxy(own_box.port) as proxy:
        reader = RedisIndexReader(own_box.url_through(proxy.port), "ns", budget_s=20.0)
        proxy.delay_s = 0.02

        async def look_up(num_blocks: int) -> None:
            assert await reader.longest_prefix(prompts[num_blocks], [WHO.ref]) == {WHO.ref: num_blocks}

        num_cancelled = 0
        while num_cancelled < 50:  # a round on a busy machine may be over before anybody leaves
            tasks = [asyncio.create_task(look_up(num_blocks)) for num_blocks in prompts]
            leaving = [task for task in tasks if rng.random() < 0.5]
            await asyncio.sleep(rng.uniform(0.0, 0.1))
            for task in leaving:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results)
            num_cancelled += sum(isinstance(result, asyncio.CancelledError) for result in results)
        assert reader.counts.num_invalid == 0
        await reader.close()
    await lease.close()
    await writer.close()


async def test_a_reply_without_the_calls_echo_is_dropped_with_its_connection(own_box: RedisBox) -> None:
    reader = RedisIndexReader(own_box.url, "ns", budget_s=5.0)

    async def other_reply(keys: object, args: object) -> list[object]:
        return [b"another call", 12]

    genuine, reader._lookup = reader._lookup, other_reply  # type: ignore[assignment]
    assert await reader.longest_prefix(PROMPT, [WHO.ref]) == {}
    assert reader.counts.num_invalid == 1
    reader._lookup = genuine
    assert await reader.longest_prefix(PROMPT, [WHO.ref]) == {}
    assert reader.counts.num_answered == 1
    await reader.close()


@pytest.mark.parametrize("poison", ["list", "string"])
async def test_a_set_of_the_wrong_type_counts_as_nothing_and_is_healed(
    own_box: RedisBox, presence: WorkerPresence, poison: str
) -> None:
    reader = RedisIndexReader(own_box.url, "ns", budget_s=5.0)
    await wait_until_found(reader, len(PROMPT))
    client, key = own_box.client(), Keys("ns").members(WHO.ref)
    client.delete(key)
    if poison == "list":
        client.rpush(key, "x")
    else:
        client.set(key, b"\xff" * 1000)
    assert await reader.longest_prefix(PROMPT, [WHO.ref]) == {}
    presence.publish(chain("news", 1), [])
    await wait_until_found(reader, len(PROMPT))
    await reader.close()


async def test_poisoned_registrations_are_ignored_and_counted(own_box: RedisBox, presence: WorkerPresence) -> None:
    client, keys = own_box.client(), Keys("ns")
    values = {
        "pickle#a": pickle.dumps({"worker_id": "pickle"}),
        "utf8#a": b"\xff\xfe",
        "large#a": b"x" * 10_000_000,
        "number#a": b"7",
        "list#a": b"[1, 2]",
        "role#a": json.dumps(
            {"worker_id": "role", "incarnation": "a", "role": "root", "address": "127.0.0.1:1"}
        ).encode(),
        "liar#a": encode(registration("p0")),
        "port#a": encode(registration("port")).replace(b"4000", b"99999"),
        "url#a": encode(registration("url")).replace(b"127.0.0.1", b"evil/../x?"),
        "deep#a": b"[" * 2000,
    }
    for ref, value in values.items():
        client.sadd(keys.workers, ref)
        client.set(keys.lease(WorkerRef.parse(ref)), value)
    client.sadd(keys.workers, b"\xff\x00", b"y" * 1_000_000)
    registry = RedisRegistry(own_box.url, "ns")
    assert await registry.live_workers() == [WHO]
    assert registry.num_invalid == len(values)
    await registry.close()


async def test_a_list_of_workers_of_the_wrong_type_is_healed(own_box: RedisBox, presence: WorkerPresence) -> None:
    client, key = own_box.client(), Keys("ns").workers
    client.delete(key)
    client.rpush(key, "x")
    registry = RedisRegistry(own_box.url, "ns")
    assert await registry.live_workers() in (None, [WHO])

    async def is_healed() -> bool:
        return await registry.live_workers() == [WHO]

    await until(is_healed)
    await registry.close()


@pytest.mark.parametrize("depth", [-2, 13, "12", b"12", None, 1.5])
async def test_a_depth_that_cannot_be_true_is_left_out(own_box: RedisBox, depth: object) -> None:
    reader = RedisIndexReader(own_box.url, "ns")
    assert reader._checked([depth, 12], [WorkerRef("x", "a"), WHO.ref], 12) == {WHO.ref: 12}
    assert reader.counts.num_invalid == 1
    await reader.close()


def test_decode_is_the_inverse_of_encode() -> None:
    assert decode(b"p0#a", encode(WHO)) == WHO
    assert decode(b"p1#a", encode(WHO)) is None


@pytest.mark.parametrize("num_left", [0, 7])
async def test_a_set_that_lost_members_is_sent_again_although_the_worker_is_idle(
    own_box: RedisBox, presence: WorkerPresence, num_left: int
) -> None:
    """Evicted or deleted by somebody, with the number of the last batch still there."""
    reader = RedisIndexReader(own_box.url, "ns", budget_s=5.0)
    await wait_until_found(reader, len(PROMPT))
    own_box.client().srem(Keys("ns").members(WHO.ref), *[each[:MEMBER_BYTES] for each in PROMPT[num_left:]])
    assert await reader.longest_prefix(PROMPT, [WHO.ref]) == ({WHO.ref: num_left} if num_left else {})
    await wait_until_found(reader, len(PROMPT))
    await reader.close()


async def test_a_redis_that_evicts_what_it_gets_is_sent_the_set_once_a_heartbeat(own_box: RedisBox) -> None:
    """Not once more for each batch that finds the set gone."""
    client = own_box.client()
    lease = Lease(own_box.url, "ns", WHO, 30.0)
    writer = RedisIndexWriter(own_box.url, "ns", WHO.ref, 30.0, lambda: PROMPT)
    await lease.renew()
    await writer.flush()
    client.delete(Keys("ns").members(WHO.ref))
    writer.publish(chain("more", 1), [])
    writer._has_news.clear()
    await writer.flush()
    assert writer._needs_resync
    assert not writer._has_news.is_set()
    assert writer.counts.num_resyncs == 1
    for resource in (lease, writer):
        await resource.close()
