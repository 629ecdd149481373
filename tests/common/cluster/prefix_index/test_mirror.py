"""The router's copy of the index against a real server: what it says without asking is what Redis would say."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from common.cluster.keys import Keys
from common.cluster.prefix_index import mirror as mirror_module
from common.cluster.prefix_index.mirror import MirroredIndexReader, _depth, _members, _unpacked
from common.cluster.prefix_index.reader import RedisIndexReader
from common.values.ids import WorkerRef
from tests.common.cluster.prefix_index.conftest import chain
from tests.common.cluster.prefix_index.test_redis import Cluster, Worker, cluster_on
from tests.redis_box import RedisBox
from tests.waiting import until


@asynccontextmanager
async def mirrored(box: RedisBox, namespace: str) -> AsyncIterator[tuple[Cluster, MirroredIndexReader]]:
    async with cluster_on(box.url, namespace) as cluster:
        mirror = MirroredIndexReader(RedisIndexReader(box.url, namespace, budget_s=5.0), box.url, namespace)
        mirror.start()
        try:
            yield cluster, mirror
        finally:
            await mirror.close()


async def until_so(is_so: Callable[[], bool]) -> None:
    async def answer() -> bool:
        return is_so()

    await until(answer)


async def copied(mirror: MirroredIndexReader, worker: Worker) -> None:
    """Wait for a copy, by look-ups as a router makes them."""

    async def has_copy() -> bool:
        mirror._state.asked_s.clear()
        await mirror.longest_prefix(chain("anything", 1), [worker.ref])
        return mirror.known_prefix(chain("anything", 1), [worker.ref]) is not None

    await until(has_copy)


async def test_the_first_look_up_asks_redis_and_later_ones_nobody(box: RedisBox) -> None:
    async with mirrored(box, "first") as (cluster, mirror):
        worker = await cluster.worker("p0")
        prompt = chain("prompt", 9)
        await worker.store(prompt[:5])
        assert mirror.known_prefix(prompt, [worker.ref]) is None
        assert await mirror.longest_prefix(prompt, [worker.ref]) == {worker.ref: 5}
        await copied(mirror, worker)
        num_asked = mirror._reader.counts.num_answered
        assert mirror.known_prefix(prompt, [worker.ref]) == {worker.ref: 5}
        assert await mirror.longest_prefix(prompt, [worker.ref]) == {worker.ref: 5}
        assert mirror._reader.counts.num_answered == num_asked


async def test_a_worker_without_a_copy_makes_the_look_up_ask_redis(box: RedisBox) -> None:
    async with mirrored(box, "partial") as (cluster, mirror):
        first, second = await cluster.worker("p0"), await cluster.worker("p1")
        prompt = chain("prompt", 4)
        await first.store(prompt)
        await second.store(prompt[:2])
        await copied(mirror, first)
        assert mirror.known_prefix(prompt, [first.ref, second.ref]) is None
        assert await mirror.longest_prefix(prompt, [first.ref, second.ref]) == {first.ref: 4, second.ref: 2}


async def test_changes_follow_a_copy_in_order(box: RedisBox) -> None:
    """Random batches of several workers, with resyncs: the copies end where Redis does."""
    rng = random.Random(5)
    async with mirrored(box, "changes") as (cluster, mirror):
        workers = [await cluster.worker(f"p{number}") for number in range(3)]
        for worker in workers:
            await copied(mirror, worker)
        prompt = chain("prompt", 40)
        for _ in range(60):
            worker = rng.choice(workers)
            worker.blocks = prompt[: rng.randrange(41)]
            if rng.random() < 0.2:
                worker.writer._start_over()
            else:
                worker.writer.publish(worker.blocks, prompt[len(worker.blocks) :])
            await worker.writer.flush()
        expected = {worker.ref: len(worker.blocks) for worker in workers if worker.blocks}
        refs = [worker.ref for worker in workers]
        assert await cluster.reader.longest_prefix(prompt, refs) == expected
        await until_so(lambda: mirror.known_prefix(prompt, refs) == expected)
        assert (mirror.counts.num_gaps, mirror.counts.num_invalid, mirror.counts.num_copies) == (0, 0, 3)


async def test_a_missed_change_drops_the_copy_and_a_new_one_comes(box: RedisBox) -> None:
    async with mirrored(box, "gap") as (cluster, mirror):
        worker = await cluster.worker("p0")
        prompt = chain("prompt", 6)
        await copied(mirror, worker)
        mirror._state.copies[worker.ref].sequence -= 1  # as if a message had been lost
        await worker.store(prompt)
        await until_so(lambda: mirror.counts.num_gaps == 1)
        assert mirror.known_prefix(prompt, [worker.ref]) is None
        await copied(mirror, worker)
        assert mirror.known_prefix(prompt, [worker.ref]) == {worker.ref: 6}


async def test_a_lost_connection_drops_all_copies_and_they_come_back(box: RedisBox) -> None:
    async with mirrored(box, "lost") as (cluster, mirror):
        worker = await cluster.worker("p0")
        prompt = chain("prompt", 3)
        await worker.store(prompt)
        await copied(mirror, worker)
        box.client().client_kill_filter(_type="pubsub")
        await until_so(lambda: mirror.counts.num_connections == 2)
        assert mirror.known_prefix(prompt, [worker.ref]) is None
        await copied(mirror, worker)
        assert mirror.known_prefix(prompt, [worker.ref]) == {worker.ref: 3}


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"1 2 3",
        b"x 2 0 p0#a\n",
        b"1 2 0 p0\n",
        b"1 2 0 p0#a\nshort",
        b"1 2 0 \xff#a\n",
        b"1 2 -5 p0#a\n" + b"m" * 16,
    ],
)
async def test_a_message_that_nobody_of_ours_wrote_only_costs_the_copies(box: RedisBox, message: bytes) -> None:
    async with mirrored(box, "poison") as (cluster, mirror):
        worker = await cluster.worker("p0")
        await copied(mirror, worker)
        box.client().publish(Keys("poison").news, message)
        await until_so(lambda: mirror.counts.num_invalid + mirror.counts.num_gaps == 1)
        assert mirror.known_prefix(chain("a", 1), [worker.ref]) is None
        await copied(mirror, worker)


async def test_a_copy_that_was_not_asked_for_is_not_kept(box: RedisBox) -> None:
    async with mirrored(box, "unasked") as (cluster, mirror):
        worker = await cluster.worker("p0")
        await copied(mirror, worker)
        num_members = mirror_module.MAX_MEMBERS + 1
        for ref, num in ((WorkerRef("other", "a"), 1), (worker.ref, num_members)):
            head = f"-1 7 {16 * num} {ref}\n".encode()
            box.client().publish(mirror._channel, head + b"m" * 16 * num)
        await worker.store(chain("prompt", 3))
        await until_so(lambda: mirror.known_prefix(chain("prompt", 3), [worker.ref]) == {worker.ref: 3})
        assert list(mirror._state.copies) == [worker.ref]


async def test_no_bug_ends_the_mirror_or_leaves_its_copies(
    box: RedisBox, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with mirrored(box, "bug") as (cluster, mirror):
        worker = await cluster.worker("p0")
        await copied(mirror, worker)
        with monkeypatch.context() as patch:
            patch.setattr(mirror, "_on_change", lambda data, is_copy: 1 // 0)
            await worker.store(chain("prompt", 3))
            await until_so(lambda: "ZeroDivisionError" in capsys.readouterr().out)
        assert mirror.known_prefix(chain("prompt", 3), [worker.ref]) is None
        await copied(mirror, worker)
        assert mirror.known_prefix(chain("prompt", 3), [worker.ref]) == {worker.ref: 3}


async def test_a_set_too_large_is_not_mirrored(box: RedisBox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror_module, "MAX_MEMBERS", 10)
    async with mirrored(box, "large") as (cluster, mirror):
        worker = await cluster.worker("p0")
        prompt = chain("prompt", 11)
        await worker.store(prompt[:8])
        await copied(mirror, worker)
        await worker.store(prompt[8:])
        await until_so(lambda: mirror.counts.num_gaps == 1)
        assert await mirror.longest_prefix(prompt, [worker.ref]) == {worker.ref: 11}
        assert mirror.known_prefix(prompt, [worker.ref]) is None


async def test_a_worker_that_may_not_tell_its_changes_is_noticed_on_both_sides(
    box: RedisBox, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its user lacks the right to the channel: it says so, and what routers copied of it does not last."""
    monkeypatch.setattr(mirror_module, "SILENCE_S", 0.3)
    monkeypatch.setattr(mirror_module, "PING_INTERVAL_S", 0.1)
    rules = ("on", ">mute", "~*", "+@all", "resetchannels")
    box.client().execute_command("ACL", "SETUSER", "mute", *rules)
    url = f"redis://mute:mute@127.0.0.1:{box.port}/0"
    async with cluster_on(url, "mute") as cluster, mirrored(box, "mute") as (_, mirror):
        worker = await cluster.worker("p0")
        await copied(mirror, worker)
        prompt = chain("prompt", 3)
        await worker.store(prompt)
        assert worker.writer.counts.num_untold == 2, "an empty set and a batch"
        assert capsys.readouterr().out.count("index_news_refused") == 1
        await until_so(lambda: mirror.counts.num_silent > 0)
        assert await mirror.longest_prefix(prompt, [worker.ref]) == {worker.ref: 3}


async def test_a_worker_without_news_still_says_that_it_lives(box: RedisBox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror_module, "SILENCE_S", float("inf"))
    async with mirrored(box, "idle") as (cluster, mirror):
        worker = await cluster.worker("p0")
        await copied(mirror, worker)
        copy = mirror._state.copies[worker.ref]
        copy.heard_s = 0.0
        await worker.writer.flush()
        await until_so(lambda: copy.heard_s > 0.0)
        assert (mirror._state.copies[worker.ref], mirror.counts.num_gaps) == (copy, 0)


async def test_requests_are_answered_while_a_large_set_is_unpacked() -> None:
    packed = random.Random(7).randbytes(16 * 3 * mirror_module.MAX_UNPACKED + 16)
    unpacking = asyncio.ensure_future(_unpacked(packed))
    num_turns = 0
    while not unpacking.done():
        await asyncio.sleep(0)
        num_turns += 1
    assert num_turns >= 4
    assert unpacking.result() == set(_members(packed))


async def test_copies_of_workers_that_nobody_looks_up_are_dropped(
    box: RedisBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with mirrored(box, "unused") as (cluster, mirror):
        used, unused = await cluster.worker("p0"), await cluster.worker("p1")
        await copied(mirror, used)
        await copied(mirror, unused)
        monkeypatch.setattr(mirror_module, "FORGET_S", 0.0)
        mirror._state.used = {used.ref}
        mirror._forget_unused()
        assert list(mirror._state.copies) == [used.ref]


@pytest.mark.parametrize("num_held", range(10))
def test_depth_is_the_leading_run(num_held: int) -> None:
    prompt = chain("prompt", 9)
    assert _depth(prompt, {block_hash[:16] for block_hash in prompt[:num_held]}) == min(num_held, 9)
    assert _depth([], set()) == 0
