"""The router's copy of the index against a real server: what it says is what Redis has."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from common.cluster.keys import Keys
from common.cluster.prefix_index import mirror as mirror_module
from common.cluster.prefix_index.mirror import PrefixIndexMirror, _depth
from common.cluster.prefix_index.stats import WorkerIndexStats
from common.values.ids import WorkerRef
from tests.common.cluster.prefix_index.conftest import chain
from tests.common.cluster.prefix_index.test_redis import Cluster, Worker, cluster_on
from tests.redis_box import RedisBox, binaries, redis_box
from tests.tcp_proxy import tcp_proxy
from tests.waiting import LIMIT_S, until


@asynccontextmanager
async def mirrored(box: RedisBox, namespace: str) -> AsyncIterator[tuple[Cluster, PrefixIndexMirror]]:
    async with cluster_on(box.url, namespace) as cluster:
        mirror = PrefixIndexMirror(box.url, namespace)
        mirror.start()
        try:
            yield cluster, mirror
        finally:
            await mirror.close()


async def until_so(is_so: Callable[[], bool]) -> None:
    async def answer() -> bool:
        return is_so()

    await until(answer)


async def copied(mirror: PrefixIndexMirror, worker: Worker) -> None:
    """Wait for a copy, by look-ups as a router makes them."""

    async def has_copy() -> bool:
        mirror._read_s.clear()
        await mirror.longest_prefix(chain("anything", 1), [worker.ref])
        return mirror.known_prefix(chain("anything", 1), [worker.ref]) is not None

    await until(has_copy)


async def emptied(mirror: PrefixIndexMirror) -> None:
    """Connected, with nothing known or being read."""
    await until_so(lambda: mirror.counts.num_connections == 1 and not mirror._readings)
    mirror._copies.clear()
    mirror._read_s.clear()
    mirror.counts.num_copies = 0


async def test_the_first_look_up_waits_for_the_copies_and_later_ones_for_none(
    box: RedisBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror_module, "BUDGET_S", LIMIT_S)
    async with mirrored(box, "first") as (cluster, mirror):
        first, second = await cluster.worker("p0"), await cluster.worker("p1")
        prompt, refs = chain("prompt", 9), [first.ref, second.ref]
        await first.store(prompt[:5])
        await emptied(mirror)
        assert mirror.known_prefix(prompt, refs) is None
        assert await mirror.longest_prefix(prompt, refs) == {first.ref: 5}
        assert mirror.known_prefix(prompt, refs) == {first.ref: 5}
        assert mirror.counts.num_copies == 2


async def test_news_of_a_worker_brings_its_copy_without_a_look_up(box: RedisBox) -> None:
    async with mirrored(box, "news") as (cluster, mirror):
        worker = await cluster.worker("p0")
        await until_so(lambda: mirror.counts.num_connections == 1)
        assert mirror.stats([worker.ref]) == ()
        await worker.store(chain("prompt", 4))
        await until_so(lambda: mirror.stats([worker.ref]) == (WorkerIndexStats("p0", 4, 1.0),))


async def test_changes_while_a_set_is_read_are_not_missed(box: RedisBox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of a few members, and a writer that stores, evicts and starts over between them."""
    monkeypatch.setattr(mirror_module, "PAGE_SIZE", 3)
    rng = random.Random(6)
    async with mirrored(box, "pages") as (cluster, mirror):
        worker = await cluster.worker("p0")
        prompt = chain("prompt", 900)
        await worker.store(prompt[:700])
        for _ in range(10):
            await emptied(mirror)
            mirror._read(worker.ref)
            while not mirror.counts.num_copies:
                kept = rng.randrange(900)
                worker.blocks = prompt[:kept]
                if rng.random() < 0.1:
                    worker.writer._start_over()
                else:
                    worker.writer.publish(prompt[:kept], prompt[kept:])
                await worker.writer.flush()
            await until_so(lambda: mirror._copies[worker.ref].sequence == worker.writer._sequence)
            assert mirror._copies[worker.ref].members == {each[:16] for each in worker.blocks}
        assert mirror.counts.num_gaps == 0


async def test_too_much_news_while_a_set_is_read_has_it_read_again(
    box: RedisBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror_module, "MAX_KEPT_MEMBERS", 5)
    async with mirrored(box, "kept") as (cluster, mirror):
        worker = await cluster.worker("p0")
        await emptied(mirror)
        async with mirror._room, mirror._room, mirror._room, mirror._room:  # all readings wait
            mirror._read(worker.ref)
            await worker.store(chain("prompt", 6))
            await until_so(lambda: mirror.counts.num_gaps == 1)
        await copied(mirror, worker)
        assert mirror.known_prefix(chain("prompt", 6), [worker.ref]) == {worker.ref: 6}


async def test_of_a_set_too_large_the_rest_is_unknown(box: RedisBox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror_module, "MAX_MEMBERS", 600)
    async with mirrored(box, "large") as (cluster, mirror):
        worker = await cluster.worker("p0")
        await worker.store(chain("prompt", 5000))
        await copied(mirror, worker)
        assert len(mirror._copies[worker.ref].members) < 5000


async def test_a_silent_redis_holds_up_one_look_up_and_no_other(box: RedisBox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of fifty would wait for half a second."""
    monkeypatch.setattr(mirror_module, "BUDGET_S", 0.5)
    monkeypatch.setattr(mirror_module, "READ_AGAIN_S", LIMIT_S)
    async with tcp_proxy(box.port) as proxy, cluster_on(box.url, "silent") as cluster:
        mirror = PrefixIndexMirror(box.url_through(proxy.port), "silent")
        mirror.start()
        await until_so(lambda: mirror.counts.num_connections == 1)
        worker = await cluster.worker("p0")
        proxy.is_silent = True
        async with asyncio.timeout(20.0):
            for _ in range(50):
                assert await mirror.longest_prefix(chain("prompt", 3), [worker.ref]) == {}
        assert proxy.num_bytes_swallowed > 0
        await mirror.close()


async def test_without_redis_nothing_is_known_and_no_look_up_waits(tmp_path: Path) -> None:
    with redis_box(binaries()[0], tmp_path) as gone:
        gone.kill()
        mirror = PrefixIndexMirror(gone.url, "gone")
        mirror.start()
        who = WorkerRef("p0", "a")
        assert await mirror.longest_prefix(chain("prompt", 3), [who]) == {}
        assert (mirror.stats([who]), mirror._readings) == (None, {})
        await mirror.close()


async def test_what_is_no_set_of_hashes_is_counted_and_not_used(box: RedisBox) -> None:
    errors: list[str] = []
    async with mirrored(box, "types") as (cluster, mirror):
        worker = await cluster.worker("p0")
        mirror._on_error = errors.append
        keys, client = Keys("types"), box.client()
        await emptied(mirror)
        client.rpush(keys.members(worker.ref), "x")
        mirror._read(worker.ref)
        await until_so(lambda: errors == ["copy"])
        client.delete(keys.members(worker.ref))
        client.sadd(keys.members(worker.ref), b"x", b"y" * 10_000, b"m" * 16)
        await copied(mirror, worker)
        assert mirror._copies[worker.ref].members == {b"m" * 16}


async def test_the_number_of_workers_copied_is_bounded(box: RedisBox, monkeypatch: pytest.MonkeyPatch) -> None:
    """News names whom it likes."""
    monkeypatch.setattr(mirror_module, "MAX_WORKERS", 3)
    async with mirrored(box, "bounded") as (_, mirror):
        await until_so(lambda: mirror.counts.num_connections == 1)
        for number in range(20):
            mirror._read(WorkerRef(f"p{number}", "a"))
        assert len(mirror._readings) == 3


async def test_cancelled_readings_never_get_the_answer_of_another(box: RedisBox) -> None:
    """Replies are slow and half of the readings are given up; a set that comes must be its worker's own."""
    rng = random.Random(9)
    async with tcp_proxy(box.port) as proxy, cluster_on(box.url, "cancelled") as cluster:
        workers = [await cluster.worker(f"p{number}") for number in range(8)]
        for number, worker in enumerate(workers):
            await worker.store(chain(str(number), 1 + number))
        mirror = PrefixIndexMirror(box.url_through(proxy.port), "cancelled")
        mirror.start()
        await emptied(mirror)
        proxy.delay_s = 0.005
        num_cancelled = num_copies = 0
        while num_cancelled < 30 or num_copies < 30:
            for worker in workers:
                mirror._read(worker.ref)
            await asyncio.sleep(rng.uniform(0.0, 0.08))
            for ref, copy in mirror._copies.items():
                assert len(copy.members) == 1 + int(ref.worker_id[1:])
            num_copies += len(mirror._copies)
            num_cancelled += len(mirror._readings)
            mirror._forget_all()
            mirror._is_connected = True
        await mirror.close()


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
        assert await cluster.truth.longest_prefix(prompt, refs) == expected
        await until_so(lambda: mirror.known_prefix(prompt, refs) == expected)
        assert (mirror.counts.num_gaps, mirror.counts.num_invalid, mirror.counts.num_copies) == (0, 0, 3)


async def test_a_missed_change_drops_the_copy_and_a_new_one_comes(box: RedisBox) -> None:
    async with mirrored(box, "gap") as (cluster, mirror):
        worker = await cluster.worker("p0")
        prompt = chain("prompt", 6)
        await copied(mirror, worker)
        mirror._copies[worker.ref].sequence -= 1  # as if a message had been lost
        await worker.store(prompt)
        await until_so(lambda: mirror.counts.num_gaps == 1)
        await copied(mirror, worker)
        assert mirror.counts.num_copies == 2
        assert mirror.known_prefix(prompt, [worker.ref]) == {worker.ref: 6}


async def test_a_lost_connection_drops_all_copies_and_they_come_back(box: RedisBox) -> None:
    async with mirrored(box, "lost") as (cluster, mirror):
        worker = await cluster.worker("p0")
        prompt = chain("prompt", 3)
        await worker.store(prompt)
        await copied(mirror, worker)
        box.client().client_kill_filter(_type="pubsub")
        await until_so(lambda: mirror.counts.num_connections == 2)
        await copied(mirror, worker)
        assert mirror.counts.num_copies == 2
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
        await copied(mirror, worker)
        assert mirror.counts.num_copies == 2


async def test_no_bug_ends_the_mirror_or_leaves_its_copies(
    box: RedisBox, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with mirrored(box, "bug") as (cluster, mirror):
        worker = await cluster.worker("p0")
        await copied(mirror, worker)
        with monkeypatch.context() as patch:
            patch.setattr(mirror, "_on_change", lambda ref, change: 1 // 0)
            await worker.store(chain("prompt", 3))
            await until_so(lambda: "ZeroDivisionError" in capsys.readouterr().out)
        await copied(mirror, worker)
        assert mirror.counts.num_copies == 2
        assert mirror.known_prefix(chain("prompt", 3), [worker.ref]) == {worker.ref: 3}


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
        await copied(mirror, worker)
        assert await mirror.longest_prefix(prompt, [worker.ref]) == {worker.ref: 3}


async def test_a_worker_without_news_still_says_that_it_lives(box: RedisBox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror_module, "SILENCE_S", float("inf"))
    async with mirrored(box, "idle") as (cluster, mirror):
        worker = await cluster.worker("p0")
        await copied(mirror, worker)
        copy = mirror._copies[worker.ref]
        copy.heard_s = 0.0
        await worker.writer.flush()
        await until_so(lambda: copy.heard_s > 0.0)
        assert (mirror._copies[worker.ref], mirror.counts.num_gaps) == (copy, 0)


@pytest.mark.parametrize("num_held", range(10))
def test_depth_is_the_leading_run(num_held: int) -> None:
    prompt = chain("prompt", 9)
    assert _depth(prompt, {block_hash[:16] for block_hash in prompt[:num_held]}) == min(num_held, 9)
    assert _depth([], set()) == 0
