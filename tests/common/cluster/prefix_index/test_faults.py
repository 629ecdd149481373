"""Registry and index when Redis is away, silent, wiped, full or poisoned: slower routing, nothing else."""

import json
import pickle
from collections.abc import AsyncIterator

import pytest

from common.cluster.keys import MEMBER_BYTES, Keys
from common.cluster.prefix_index.writer import RedisIndexWriter
from common.cluster.presence import WorkerPresence
from common.cluster.redis import REDIS_ERRORS
from common.cluster.registry import Lease, RedisRegistry, decode, encode
from common.values.ids import BlockHash, WorkerRef
from tests.common.cluster.prefix_index.conftest import Truth, chain, registration
from tests.redis_box import RedisBox
from tests.waiting import until

WHO = registration("p0")
PROMPT = chain("prompt", 12)


@pytest.fixture
async def presence(own_box: RedisBox) -> AsyncIterator[WorkerPresence]:
    """A live worker on `own_box` that holds PROMPT, with a lease short enough to see it end."""
    made = WorkerPresence(own_box.url, "ns", WHO, lease_s=1.5, snapshot=lambda: PROMPT)
    await made.start()
    yield made
    await made.close()


async def wait_until_found(truth: Truth, num_blocks: int) -> None:
    async def is_found() -> bool:
        return await truth.longest_prefix(PROMPT, [WHO.ref]) == {WHO.ref: num_blocks}

    await until(is_found)


async def test_registry_without_redis_says_that_it_does_not_know(own_box: RedisBox) -> None:
    own_box.kill()
    registry = RedisRegistry(own_box.url, "ns")
    assert await registry.live_workers() is None
    await registry.close()


async def test_index_and_registry_refill_after_redis_lost_everything(
    own_box: RedisBox, presence: WorkerPresence
) -> None:
    truth, registry = Truth(own_box.url, "ns"), RedisRegistry(own_box.url, "ns")
    await wait_until_found(truth, len(PROMPT))
    own_box.kill()
    presence.publish(chain("meanwhile", 3), [])
    own_box.start_again()
    await wait_until_found(truth, len(PROMPT))
    assert await registry.live_workers() == [WHO]
    await truth.close()
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
    truth = Truth(own_box.url, "ns")
    await wait_until_found(truth, len(PROMPT))
    own_box.client().flushall()
    await wait_until_found(truth, len(PROMPT))
    await truth.close()


async def test_lost_writes_are_found_and_the_index_is_the_truth_again(
    own_box: RedisBox, presence: WorkerPresence
) -> None:
    """As after a failover to a replica that lagged: fewer blocks, an older number."""
    truth = Truth(own_box.url, "ns")
    await wait_until_found(truth, len(PROMPT))
    keys, client = Keys("ns"), own_box.client()
    client.srem(keys.members(WHO.ref), *[block_hash[:MEMBER_BYTES] for block_hash in PROMPT[6:]])
    client.decr(keys.sequence(WHO.ref))
    assert await truth.longest_prefix(PROMPT, [WHO.ref]) == {WHO.ref: 6}
    await wait_until_found(truth, len(PROMPT))
    await truth.close()


async def test_a_full_redis_refuses_additions_but_takes_removals(own_box: RedisBox) -> None:
    client = own_box.client()
    lease = Lease(own_box.url, "ns", WHO, 30.0)
    pool: list[BlockHash] = []
    writer = RedisIndexWriter(own_box.url, "ns", WHO.ref, 30.0, lambda: pool)
    truth = Truth(own_box.url, "ns")
    await lease.renew()
    await writer.flush()
    writer.publish(PROMPT, [])
    await writer.flush()
    client.config_set("maxmemory", 1)
    writer.publish(chain("more", 5), PROMPT[8:])
    await writer.flush()
    assert writer.counts.num_dropped == 5
    assert await truth.longest_prefix(PROMPT, [WHO.ref]) == {WHO.ref: 8}
    assert await lease.renew()
    # Room again: the whole pool is sent once the pause is over.
    client.config_set("maxmemory", 0)
    pool = chain("more", 5)
    writer._retry_dropped_s = 0.0
    await writer.flush()
    assert await truth.longest_prefix(chain("more", 5), [WHO.ref]) == {WHO.ref: 5}
    for resource in (lease, writer, truth):
        await resource.close()


@pytest.mark.parametrize("poison", ["list", "string"])
async def test_a_set_of_the_wrong_type_counts_as_nothing_and_is_healed(
    own_box: RedisBox, presence: WorkerPresence, poison: str
) -> None:
    truth = Truth(own_box.url, "ns")
    await wait_until_found(truth, len(PROMPT))
    client, key = own_box.client(), Keys("ns").members(WHO.ref)
    client.delete(key)
    if poison == "list":
        client.rpush(key, "x")
    else:
        client.set(key, b"\xff" * 1000)
    assert await truth.longest_prefix(PROMPT, [WHO.ref]) == {}
    presence.publish(chain("news", 1), [])
    await wait_until_found(truth, len(PROMPT))
    await truth.close()


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


def test_decode_is_the_inverse_of_encode() -> None:
    assert decode(b"p0#a", encode(WHO)) == WHO
    assert decode(b"p1#a", encode(WHO)) is None


@pytest.mark.parametrize("num_left", [0, 7])
async def test_a_set_that_lost_members_is_sent_again_although_the_worker_is_idle(
    own_box: RedisBox, presence: WorkerPresence, num_left: int
) -> None:
    """Evicted or deleted by somebody, with the number of the last batch still there."""
    truth = Truth(own_box.url, "ns")
    await wait_until_found(truth, len(PROMPT))
    own_box.client().srem(Keys("ns").members(WHO.ref), *[each[:MEMBER_BYTES] for each in PROMPT[num_left:]])
    assert await truth.longest_prefix(PROMPT, [WHO.ref]) == ({WHO.ref: num_left} if num_left else {})
    await wait_until_found(truth, len(PROMPT))
    await truth.close()


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
