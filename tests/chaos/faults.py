"""The faults: each makes a function that does it to a scene and answers how it is proven to have happened."""

import asyncio
import os
import signal
from collections.abc import Sequence
from contextlib import ExitStack

import psutil

from tests.chaos import sockets
from tests.chaos.rig import Act, Scene, Void, Worker, is_gone

PREFILLING = ("running",)
TRANSFERRING = ("computed",)  # on the prefill worker: all computed, not acknowledged yet
RESERVED = ("reserved",)  # on the decode worker: its blocks wait for KV
DECODING = ("ready",)


def kill_worker(role: str, phases: Sequence[str]) -> Act:
    """SIGKILL a worker at the moment when it holds something in one of these phases."""

    async def act(scene: Scene) -> str:
        victim = await scene.rig.catch(role, phases)
        scene.begins()
        return f"{victim['worker_id']} {'/'.join(phases)}: {await scene.rig.kill(victim['pid'])}"

    return act


def kill_queued(role: str) -> Act:
    """SIGKILL a worker while requests wait there."""

    async def act(scene: Scene) -> str:
        def waiting() -> Worker | None:
            return next((worker for worker in scene.rig.workers(role) if worker["waiting"]), None)

        victim = await scene.rig.until(waiting, f"a {role} worker with a queue")
        scene.begins()
        return f"{victim['worker_id']} {victim['waiting']} waiting: {await scene.rig.kill(victim['pid'])}"

    return act


def freeze_worker(role: str, phases: Sequence[str], for_s: float) -> Act:
    """SIGSTOP long enough that the worker is given up, then SIGCONT: what comes back is a new life."""

    async def act(scene: Scene) -> str:
        rig = scene.rig
        victim = await rig.catch(role, phases) if phases else rig.workers(role)[0]
        scene.begins()
        with rig.frozen(victim["pid"]):
            proof = await rig.until_frozen(victim["pid"])
            await asyncio.sleep(for_s)
            listed = [worker["incarnation"] for worker in await asyncio.to_thread(rig.workers)]
            assert victim["incarnation"] not in listed, f"a worker frozen for {for_s:g} s is believed to live"
        scene.lifted()
        await rig.until_whole()
        lives = [worker["incarnation"] for worker in await asyncio.to_thread(rig.workers)]
        assert victim["incarnation"] not in lives, "a worker came back under the incarnation that was given up"
        return f"{victim['worker_id']}: {proof} for {for_s:g} s"

    return act


def slow_worker(role: str, for_s: float, share: float = 0.1) -> Act:
    """A worker that runs a tenth of the time: SIGSTOP and SIGCONT by turns."""

    async def act(scene: Scene) -> str:
        victim = scene.rig.workers(role)[0]
        process, num_stops, used_s = psutil.Process(victim["pid"]), 0, 0.0
        scene.begins()
        loop = asyncio.get_running_loop()
        end_s = loop.time() + for_s
        while loop.time() < end_s:
            with scene.rig.frozen(victim["pid"]):
                await asyncio.sleep(0.1 * (1 - share))
                num_stops += process.status() == psutil.STATUS_STOPPED
            await asyncio.sleep(0.1 * share)
            used_s += 0.1 * share
        scene.lifted()
        if num_stops < for_s:
            raise Void(f"stopped {num_stops} times only")
        return f"{victim['worker_id']} stopped {num_stops} times in {for_s:g} s"

    return act


def wedge_router(for_s: float) -> Act:
    """The router's event loop stands still, its sockets stay open."""

    async def act(scene: Scene) -> str:
        rig = scene.rig
        before = {worker["incarnation"] for worker in rig.workers()}
        pid = rig.router_pid()
        await rig.catch("decode", DECODING)
        scene.begins()
        with rig.frozen(pid):
            proof = await rig.until_frozen(pid)
            await asyncio.sleep(for_s)
        scene.lifted()
        after = {worker["incarnation"] for worker in await asyncio.to_thread(rig.workers)}
        assert after == before, "workers were given up though only the router stood still"
        return f"router: {proof} for {for_s:g} s"

    return act


def signal_router(number: signal.Signals) -> Act:
    """End the router under requests of every phase; `pdserve up` starts another."""

    async def act(scene: Scene) -> str:
        rig = scene.rig
        process = psutil.Process(rig.router_pid())
        await rig.catch("decode", DECODING)
        scene.begins()
        os.kill(process.pid, number)
        await rig.until(lambda: is_gone(process), "end of the router", 15)
        return f"{number.name}, router pid {process.pid} is gone"

    return act


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


def kill_gcs() -> Act:
    """Ray's head is gone; the supervisor of one machine does not outlive it, but what runs must finish right."""

    async def act(scene: Scene) -> str:
        scene.begins()
        return f"gcs_server: {await scene.rig.kill(scene.rig.gcs_pid())}"

    return act


def drop_link(link: str, for_s: float) -> Act:
    """All packets of a handoff pair are dropped, on `control`, `kv`, `both`, or only those to `prefill`."""

    async def act(scene: Scene) -> str:
        rig = scene.rig
        prefill = await rig.catch("prefill", (*PREFILLING, *TRANSFERRING))
        with ExitStack() as stack:
            ends = []
            for decode in rig.workers("decode"):
                ends += stack.enter_context(rig.control_links(prefill, decode)) if link != "kv" else []
                ends += stack.enter_context(rig.kv_links(prefill, decode)) if link in ("kv", "both") else []
            if link == "prefill":
                ends = [end for end in ends if end.pid == prefill["pid"]]
            before = _retransmits(ends)
            scene.begins()
            with sockets.black_hole(ends):
                await asyncio.sleep(for_s)
                num_resent = _retransmits(ends) - before
            scene.lifted()
        if not ends or num_resent <= 0:
            raise Void(f"{len(ends)} connection ends, {num_resent} retransmits")
        return f"{len(ends)} connection ends deaf for {for_s:g} s, {num_resent} segments sent again"

    return act


def drop_router_link(role: str, for_s: float) -> Act:
    """All packets between the router and one worker are dropped."""

    async def act(scene: Scene) -> str:
        rig = scene.rig
        worker = await rig.catch(role, (*DECODING, *PREFILLING))
        with rig.router_links(worker) as ends:
            before = _retransmits(ends)
            scene.begins()
            with sockets.black_hole(ends):
                await asyncio.sleep(for_s)
                num_resent = _retransmits(ends) - before
            scene.lifted()
        if num_resent <= 0:
            raise Void(f"{len(ends)} connection ends, {num_resent} retransmits")
        return f"{worker['worker_id']}: {len(ends)} ends deaf for {for_s:g} s, {num_resent} segments sent again"

    return act


def reset_link(link: str) -> Act:
    """RST on the connections of a handoff pair while it moves KV."""

    async def act(scene: Scene) -> str:
        rig = scene.rig
        prefill = await rig.catch("prefill", (*PREFILLING, *TRANSFERRING))
        num_reset = 0
        scene.begins()
        for decode in rig.workers("decode"):
            links = rig.control_links if link == "control" else rig.kv_links
            with links(prefill, decode) as ends:
                num_reset += sockets.reset([end for end in ends if end.pid == prefill["pid"]])
        if not num_reset:
            raise Void("no connection to reset")
        return f"{prefill['worker_id']}: RST on {num_reset} {link} connections"

    return act


def slow_link(bytes_per_s: int, for_s: float) -> Act:
    """The KV connections of every pair are limited to so many bytes per second."""

    async def act(scene: Scene) -> str:
        rig = scene.rig
        with ExitStack() as stack:
            ends = []
            for prefill in rig.workers("prefill"):
                for decode in rig.workers("decode"):
                    ends += stack.enter_context(rig.kv_links(prefill, decode))
            scene.begins()
            with sockets.paced(ends, bytes_per_s):
                await asyncio.sleep(for_s)
                rates = {end.pacing_rate for end in ends}
            scene.lifted()
        if rates != {bytes_per_s}:
            raise Void(f"{len(ends)} ends, rates {rates}")
        return f"{len(ends)} connection ends limited to {bytes_per_s} B/s for {for_s:g} s"

    return act


def _retransmits(ends: Sequence[sockets.Connection]) -> int:
    return sum(end.num_retransmits for end in ends)


def hogs(count: int, for_s: float) -> Act:
    """Other programs take the processors."""

    async def act(scene: Scene) -> str:
        before = {worker["incarnation"] for worker in scene.rig.workers()}
        command = ("sh", "-c", "while :; do :; done")
        scene.begins()
        started = [await asyncio.create_subprocess_exec(*command) for _ in range(count)]
        try:
            await asyncio.sleep(for_s)
            used_s = sum(sum(psutil.Process(hog.pid).cpu_times()[:2]) for hog in started)
        finally:
            for hog in started:
                hog.kill()
                await hog.wait()
        scene.lifted()
        after = {worker["incarnation"] for worker in await asyncio.to_thread(scene.rig.workers)}
        assert after == before, "a slow machine was taken for dead workers"
        if used_s < 0.1 * for_s:
            raise Void(f"the hogs got {used_s:.1f} s of processor time")
        return f"{count} hogs used {used_s:.1f} s of processor time in {for_s:g} s"

    return act
