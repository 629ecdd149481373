"""Faults from inside a process: exceptions, numbers that are none, disorder on a link, death at an exact moment."""

import asyncio
import time
from collections.abc import Sequence

import psutil

from tests.chaos.clients import Clients
from tests.chaos.faults import PREFILLING
from tests.chaos.ledger import Outcome, count_outcomes
from tests.chaos.rig import Act, Scene, Void, Worker, is_gone

HOUR_S = 3600


def break_a_layer() -> Act:
    """One exception amid a prefill step: its requests go elsewhere, the worker lives."""

    async def act(scene: Scene) -> str:
        rig = scene.rig
        victim = await rig.catch("prefill", PREFILLING)
        scene.begins()
        await rig.order(victim["pid"], "break_layer", at_call=2)
        await _until_hits(scene, [victim], "break_layer", 1)
        await _must_live(scene, victim)
        return f"{victim['worker_id']}: one exception in the second layer of a step, pid {victim['pid']} lives"

    return act


def spoil_a_row(at_least: int) -> Act:
    """The logits of one request of a batch are not finite: that one gets an error, the others are right."""

    async def act(scene: Scene) -> str:
        rig, clients = scene.rig, scene.clients
        scene.begins()
        victim = rig.workers("decode")[0]
        await rig.order(victim["pid"], "spoil_row", at_least=at_least)
        await _until_hits(scene, [victim], "spoil_row", 1)
        await rig.until(lambda: _num_failed(clients), "an error that a client got")
        await _must_live(scene, victim)
        assert _num_failed(clients) == 1, f"one row was not finite, and {count_outcomes(clients.entries)}"
        return f"{victim['worker_id']}: logits of one of {at_least} rows or more not finite, one client got an error"

    return act


def _num_failed(clients: Clients) -> int:
    return sum(entry.outcome is Outcome.ERROR for entry in clients.entries)


def too_few_blocks() -> Act:
    """The prefill worker has no blocks for another prompt until one is let go."""

    async def act(scene: Scene) -> str:
        workers = scene.rig.workers("prefill")
        scene.begins()
        for worker in workers:
            await scene.rig.order(worker["pid"], "count_refused_allocations")
        num_refused = await _until_hits(scene, workers, "count_refused_allocations", 3)
        for worker in workers:
            await _must_live(scene, worker)
        scene.lifted()
        return f"{num_refused} allocations of blocks were refused"

    return act


def disorder_the_link(doubled: int, swapped: int) -> Act:
    """Messages of a handoff come twice, then out of order."""

    async def act(scene: Scene) -> str:
        rig = scene.rig
        victim = rig.workers("prefill")[0]
        num_retries = rig.counter("pdserve_request_retries_total")
        scene.begins()
        await rig.order(victim["pid"], "disorder_link", doubled=doubled, swapped=swapped)
        await _until_hits(scene, [victim], "doubled", doubled)
        await _until_hits(scene, [victim], "swapped", swapped)
        for worker in rig.workers():
            await _must_live(scene, worker)
        scene.lifted()
        num_again = rig.counter("pdserve_request_retries_total") - num_retries
        assert num_again > 0, "no message out of order was refused"
        return f"{victim['worker_id']}: {doubled} messages sent twice, {swapped} pairs swapped, {num_again:g} retries"

    return act


def die_at(role: str, moment: str) -> Act:
    """A worker kills itself at an event; from outside it could not be timed."""

    async def act(scene: Scene) -> str:
        rig = scene.rig
        victim = rig.workers(role)[0]
        process = psutil.Process(victim["pid"])
        await rig.order(process.pid, "die_when", moment=moment)
        await rig.until(lambda: is_gone(process), f"the death of {victim['worker_id']}")
        scene.begins()
        noted = rig.instruments.moment_of_death(process.pid) if rig.instruments is not None else ""
        if noted != moment:
            raise Void(f"pid {process.pid} is gone, but not by its own hand")
        return f"{victim['worker_id']} {moment}: SIGKILL, pid {process.pid} is gone"

    return act


def shift_clock(role: str, for_s: float) -> Act:
    """The wall clock of one process jumps an hour ahead, then an hour behind, then back."""

    async def act(scene: Scene) -> str:
        rig, seen = scene.rig, []
        if rig.instruments is None or rig.instruments.clock is None:
            raise Void("there is no C compiler for the clock")
        before = {worker["incarnation"] for worker in rig.workers()}
        pid = rig.router_pid() if role == "router" else rig.workers(role)[0]["pid"]
        scene.begins()
        for seconds in (HOUR_S, -HOUR_S, 0):
            shown = await rig.order(pid, "shift_clock", seconds=seconds)
            seen.append(round(shown - time.time()))
            await asyncio.sleep(for_s if seconds else 0.0)
        scene.lifted()
        after = {worker["incarnation"] for worker in await asyncio.to_thread(rig.workers)}
        assert after == before, "a clock that jumped was taken for dead workers"
        if any(abs(shift - wanted) > 2 for shift, wanted in zip(seen, (HOUR_S, -HOUR_S, 0), strict=True)):
            raise Void(f"the clock showed {seen}")
        return f"the wall clock of pid {pid} was off by {seen[0]} s, then by {seen[1]} s, {for_s:g} s each"

    return act


def kill_actor(num_calls: int) -> Act:
    """Ray kills a prefill actor that has work and calls in its queue."""

    async def act(scene: Scene) -> str:
        rig = scene.rig
        victim = await rig.catch("prefill", PREFILLING)
        process = psutil.Process(victim["pid"])
        scene.begins()
        ends = await rig.order(rig.up_pid(), "kill_actor", worker_id=victim["worker_id"], num_calls=num_calls)
        await rig.until(lambda: is_gone(process), "the end of the actor")
        assert "True" not in ends and "False" not in ends, f"a dead actor answered: {ends}"
        return f"{victim['worker_id']}: {len(ends)} queued calls ended as {', '.join(sorted(set(ends)))}"

    return act


async def _until_hits(scene: Scene, workers: Sequence[Worker], of: str, count: int, limit_s: float = 60.0) -> int:
    """Wait until a plant has acted so often. Void when it does not."""
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s:
        num_hits = sum([int(await scene.rig.order(worker["pid"], "hits", of=of)) for worker in workers])
        if num_hits >= count:
            return num_hits
        await asyncio.sleep(0.05)
    raise Void(f"{of}: {num_hits} times of {count}")


async def _must_live(scene: Scene, worker: Worker) -> None:
    lives = [each["incarnation"] for each in await asyncio.to_thread(scene.rig.workers)]
    assert worker["incarnation"] in lives, f"{worker['worker_id']} did not survive it"
