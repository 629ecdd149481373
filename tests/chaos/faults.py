"""Faults of workers and routers. Each makes an `Act`: it does the thing and answers how that is proven."""

import asyncio
import os
import signal
import time
from collections.abc import Sequence

import psutil

from tests.chaos import threads
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


def kill_rank(role: str, phases: Sequence[str]) -> Act:
    """SIGKILL the last rank of a worker at such a moment: the whole worker must end."""

    async def act(scene: Scene) -> str:
        rig = scene.rig
        victim = await rig.catch(role, phases)
        rank = victim["ranks"][-1]
        assert rank["pid"] != victim["pid"], "the row needs workers of several ranks"
        process = psutil.Process(victim["pid"])
        scene.begins()
        proof = await rig.kill(rank["pid"])
        await rig.until(lambda: is_gone(process), "the end of its worker", 60)
        return f"{victim['worker_id']} {'/'.join(phases)}: rank {rank['rank']}: {proof}, its worker too"

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


def freeze_for_good(role: str, phases: Sequence[str]) -> Act:
    """SIGSTOP and never SIGCONT: somebody else has to end the process."""

    async def act(scene: Scene) -> str:
        rig = scene.rig
        victim = await rig.catch(role, phases)
        process = psutil.Process(victim["pid"])
        scene.begins()
        with rig.frozen(process.pid):
            proof = await rig.until_frozen(process.pid)
            await rig.until(lambda: is_gone(process), "the end of the frozen process", 60)
        return f"{victim['worker_id']}: {proof}, then killed"

    return act


def wedge_worker(role: str, limit_s: float = 60.0) -> Act:
    """The compute thread of a worker stands still, the rest of it goes on: the worker must end by itself."""

    async def act(scene: Scene) -> str:
        rig = scene.rig
        for _ in range(20):
            victim = await rig.catch(role, DECODING if role == "decode" else PREFILLING)
            thread = threads.thread_named(victim["pid"], "compute")
            with threads.stopped(thread):
                scene.begins()
                state = threads.state_of(victim["pid"], thread)
                if not await asyncio.to_thread(rig.answers, victim):
                    continue  # it held the interpreter's lock: that is a frozen process, not a wedged step
                process = psutil.Process(victim["pid"])
                await rig.until(lambda process=process: is_gone(process), "the end of the wedged worker", limit_s)
                return f"{victim['worker_id']}: compute thread in state {state}, the process ended by itself"
        raise Void("the compute thread held the interpreter's lock each time")

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


def signal_router_amid_prefill(number: signal.Signals, within_s: float) -> Act:
    """End the router while a prefill worker computes for it: the workers must drop all that it had asked for."""

    async def act(scene: Scene) -> str:
        rig = scene.rig
        workers = await asyncio.to_thread(rig.workers)
        process = psutil.Process(rig.router_pid())
        await rig.catch("prefill", PREFILLING)
        scene.begins()
        os.kill(process.pid, number)
        await rig.until(lambda: is_gone(process), "end of the router", 15)
        gone_s = time.monotonic()
        phases = (*PREFILLING, *TRANSFERRING, *RESERVED, *DECODING)
        before = {holding.attempt_id for worker in workers for holding in rig.holders(worker)}

        def held() -> bool:
            now = {each.attempt_id for worker in workers for each in rig.holders(worker) if each.phase in phases}
            return bool(before & now)

        await rig.until(lambda: not held(), "workers that hold nothing of a dead router")
        took_s = time.monotonic() - gone_s
        assert took_s < within_s, f"workers held blocks of a dead router for {took_s:.1f} s"
        return f"{number.name}, router pid {process.pid} is gone; its blocks were free {took_s:.1f} s later"

    return act
