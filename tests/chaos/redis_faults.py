"""Faults of Redis: gone, silent, forgetful; or it answers, and is read-only, full, evicts or is late."""

import asyncio
import secrets
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

import psutil
import redis

from common.cluster.keys import Keys
from common.values.config import ClusterConfig
from common.values.ids import WorkerRef
from tests.chaos.rig import Act, Rig, Scene, Void

NAMESPACE = ClusterConfig().namespace
LOOK_S = 0.1
JUNK_KEY = "chaos:junk"
JUNK_KEYS, JUNK_BYTES, JUNK_ROOM = 24, 32_000, 400_000


def kill_redis(away_s: float) -> Act:
    """Redis dies; our supervisor starts it again, empty. `away_s`: it is killed again until then."""

    async def act(scene: Scene) -> str:
        rig, proof = scene.rig, ""
        loop = asyncio.get_running_loop()
        scene.begins()
        end_s, num_kills = loop.time() + away_s, 0
        while num_kills == 0 or loop.time() < end_s:
            try:
                proof = await rig.kill(rig.redis_pid())
                num_kills += 1
            except (Void, psutil.NoSuchProcess, ProcessLookupError):
                await asyncio.sleep(0.05)
        scene.lifted()
        return f"redis: {proof}; {num_kills} times in {away_s:g} s"

    return act


def silence_redis(for_s: float) -> Act:
    """Redis is connected and silent: SIGSTOP, so that the kernel still accepts for it."""

    async def act(scene: Scene) -> str:
        pid = scene.rig.redis_pid()
        scene.begins()
        with scene.rig.frozen(pid):
            proof = await scene.rig.until_frozen(pid)
            await asyncio.sleep(for_s)
        scene.lifted()
        return f"redis: {proof} for {for_s:g} s"

    return act


def wipe_redis(count: int) -> Act:
    """Redis forgets everything, several times: what a fail-over to an empty replica does."""

    async def act(scene: Scene) -> str:
        scene.begins()
        with closing(scene.rig.redis()) as redis:
            lost = 0
            for _ in range(count):
                lost += int(redis.dbsize())
                redis.flushall()
                await asyncio.sleep(1.5)
        scene.lifted()
        if not lost:
            raise Void("there was nothing to lose")
        return f"FLUSHALL {count} times, {lost} keys lost"

    return act


@dataclass(frozen=True, slots=True)
class State:
    """A state that Redis gets into. `keep` runs again and again meanwhile; `count` says how often what happened."""

    begin: Callable[[redis.Redis], object]
    end: Callable[[redis.Redis], object]
    count: Callable[[redis.Redis], tuple[int, str]]
    keep: Callable[[redis.Redis], object] = lambda _: None
    takes_leases: bool = True


def hold_redis(state: State, for_s: float) -> Act:
    """Redis answers, for longer than any lease lasts, and is of no use: no worker may lose its life for that."""

    async def act(scene: Scene) -> str:
        with closing(scene.rig.redis()) as client:
            before = await asyncio.to_thread(_lives, scene.rig)
            client.config_resetstat()
            scene.begins()
            try:
                await asyncio.to_thread(state.begin, client)
                num_missing, num_looks = await _watch(state, client, before, for_s)
                count, what = state.count(client)
                meanwhile = await asyncio.to_thread(_lives, scene.rig)
            finally:
                await asyncio.to_thread(state.end, client)
            scene.lifted()
            assert meanwhile == before, f"workers went, Redis alone was in trouble: {_last_losses(scene.rig)}"
            await scene.rig.until(lambda: _num_listed(client, before) == len(before), "every lease in Redis again")
            after = await asyncio.to_thread(_lives, scene.rig)
            assert after == before, f"a worker began another life: {_last_losses(scene.rig)}"
        if not count or (state.takes_leases and not num_missing):
            raise Void(f"{count} {what}; a lease was missing at {num_missing} of {num_looks} looks")
        return f"{count} {what} in {for_s:g} s; a lease was missing at {num_missing} of {num_looks} looks"

    return act


async def _watch(state: State, client: redis.Redis, lives: frozenset[WorkerRef], for_s: float) -> tuple[int, int]:
    """Keep the state up. Answers at how many looks a lease was missing, and how many looks there were."""
    end_s, num_missing, num_looks = time.monotonic() + for_s, 0, 0
    while time.monotonic() < end_s:
        await asyncio.to_thread(state.keep, client)
        num_missing += await asyncio.to_thread(_num_listed, client, lives) < len(lives)
        num_looks += 1
        await asyncio.sleep(LOOK_S)
    return num_missing, num_looks


def _lives(rig: Rig) -> frozenset[WorkerRef]:
    ready = [worker for worker in rig.workers() if worker["state"] == "ready"]
    return frozenset(WorkerRef(worker["worker_id"], worker["incarnation"]) for worker in ready)


def _last_losses(rig: Rig) -> list[str]:
    """What the logs say of workers that were given up: a machine that is too busy looks the same from here."""
    words = ("worker_dropped", "worker_life_given_up", "worker_stream_ended")
    return [line for line in rig.cluster.logs().splitlines() if any(word in line for word in words)][-4:]


def _num_listed(client: redis.Redis, lives: frozenset[WorkerRef]) -> int:
    """Of these lives, those with a lease."""
    keys = Keys(NAMESPACE)
    return int(client.exists(*(keys.lease(ref) for ref in lives)))


def _refused(error: str) -> Callable[[redis.Redis], tuple[int, str]]:
    def count(client: redis.Redis) -> tuple[int, str]:
        return client.info("errorstats").get(f"errorstat_{error}", {}).get("count", 0), f"writes refused ({error})"

    return count


def _limit_memory(client: redis.Redis, policy: str, num_bytes: int) -> None:
    client.config_set("maxmemory-policy", policy)
    client.config_set("maxmemory", num_bytes)


def _lift_limit(client: redis.Redis) -> None:
    client.config_set("maxmemory", 0)
    client.config_set("maxmemory-policy", "noeviction")
    client.delete(*(f"{JUNK_KEY}:{number}" for number in range(JUNK_KEYS)))


def _begin_evicting(client: redis.Redis) -> None:
    _limit_memory(client, "allkeys-lru", client.info("memory")["used_memory"] + JUNK_ROOM)


def _write_junk(client: redis.Redis) -> None:
    """More than fits at once: whatever is a second old has to go."""
    for number in range(JUNK_KEYS):
        client.set(f"{JUNK_KEY}:{number}", secrets.token_bytes(JUNK_BYTES))


def _fill(client: redis.Redis) -> None:
    _limit_memory(client, "noeviction", 1)
    client.flushall()


def _evicted(client: redis.Redis) -> tuple[int, str]:
    return client.info("stats")["evicted_keys"], "keys evicted"


class Late:
    """Commands wait in Redis for longer than its clients do, or nearly."""

    PAUSES_MS = (300, 400, 700)

    def __init__(self) -> None:
        self._waits_s: list[float] = []

    def begin(self, _: redis.Redis) -> None:
        self._waits_s.clear()

    def keep(self, client: redis.Redis) -> None:
        client.client_pause(self.PAUSES_MS[len(self._waits_s) % len(self.PAUSES_MS)])
        began_s = time.monotonic()
        client.ping()
        self._waits_s.append(time.monotonic() - began_s)

    def count(self, _: redis.Redis) -> tuple[int, str]:
        late = [wait_s for wait_s in self._waits_s if wait_s > 0.25]
        return len(late), f"answers late, {max(late, default=0.0):.1f} s at most"


def read_only_redis(for_s: float) -> Act:
    """A fail-over: the server has become a replica, of a master that is not there."""
    begin, end = ("127.0.0.1", "1"), ("NO", "ONE")
    return hold_redis(State(lambda r: r.replicaof(*begin), lambda r: r.replicaof(*end), _refused("READONLY")), for_s)


def lonely_redis(for_s: float) -> Act:
    """The server lacks the replicas without which it is to take no writes."""
    name = "min-replicas-to-write"
    state = State(lambda r: r.config_set(name, 3), lambda r: r.config_set(name, 0), _refused("NOREPLICAS"))
    return hold_redis(state, for_s)


def evicting_redis(for_s: float) -> Act:
    """Somebody else's data push ours out."""
    return hold_redis(State(_begin_evicting, _lift_limit, _evicted, _write_junk), for_s)


def full_redis(for_s: float) -> Act:
    """Redis is empty and takes no writes that need memory."""
    return hold_redis(State(_fill, _lift_limit, _refused("OOM")), for_s)


def late_redis(for_s: float) -> Act:
    """Redis answers after a time about as long as its clients wait, by turns a little less and a little more."""
    late = Late()
    state = State(late.begin, lambda r: r.client_unpause(), late.count, late.keep, takes_leases=False)
    return hold_redis(state, for_s)
