"""Faults around pdserve: the host, operators and clients."""

import asyncio
import json
import resource
import signal
import socket
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil

from tests.chaos.clients import Clients
from tests.chaos.ledger import Api, Entry, Outcome, problems
from tests.chaos.rig import Act, Scene, Void
from tests.cluster.cluster import free_port


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


def second_router(count: int) -> Act:
    """Another router serves the same workers; both are asked at the same time."""

    async def act(scene: Scene) -> str:
        config = scene.rig.router_config()
        ports = {"http_port": free_port(), "grpc_port": free_port(), "router_id": "router-second"}
        config["router"].update(ports)
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            file.write(json.dumps(config))
            file.flush()
            command = (sys.executable, "-m", "deploy.cli", "router", "--config", file.name)
            process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
            scene.begins()
            try:
                url = f"http://127.0.0.1:{ports['http_port']}"
                await scene.rig.until(lambda: httpx.get(f"{url}/ready").status_code == 200, "a second router", 60)
                address = f"127.0.0.1:{ports['grpc_port']}"
                async with Clients(url, address, scene.clients.questions, seed=5) as others:
                    others.start(count)
                    await others.wait()
                    assert problems(others.entries) == []
            finally:
                process.send_signal(signal.SIGTERM)
                await process.wait()
        scene.lifted()
        return f"pids {scene.rig.router_pid()} and {process.pid} served, the second {count} requests"

    return act


def full_log_disk(for_s: float) -> Act:
    """The router and the workers cannot write another byte to their log files."""

    async def act(scene: Scene) -> str:
        pids = [scene.rig.router_pid(), *(int(worker["pid"]) for worker in scene.rig.workers())]
        limits = {pid: resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in pids}
        scene.begins()
        for pid, (_, hard) in limits.items():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))
        try:
            size, num_ended = _log_bytes(pids[0]), len(scene.clients.ended)
            await asyncio.sleep(for_s)
            has_grown, num_served = _log_bytes(pids[0]) != size, len(scene.clients.ended) - num_ended
        finally:
            for pid, before in limits.items():
                resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
        scene.lifted()
        if has_grown or not num_served:
            raise Void(f"the router's log grew: {has_grown}; {num_served} requests ended meanwhile")
        return f"no log of {len(pids)} processes grew for {for_s:g} s, in which {num_served} requests ended"

    return act


def _log_bytes(pid: int) -> int:
    return Path(f"/proc/{pid}/fd/2").stat().st_size


def few_descriptors(spare: int, count: int) -> Act:
    """The router may open a few files more; then come more connections than that."""

    async def act(scene: Scene) -> str:
        process = psutil.Process(scene.rig.router_pid())
        before = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        scene.begins()
        limit = process.num_fds() + spare
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (limit, before[1]))
        host, _, port = scene.rig.cluster.url.removeprefix("http://").rpartition(":")
        try:
            with ExitStack() as stack:
                for _ in range(count):
                    stack.enter_context(socket.create_connection((host, int(port)), timeout=10))
                await asyncio.sleep(3.0)
                num_open = process.num_fds()
        finally:
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, before)
        scene.lifted()
        if num_open < limit - 2:
            raise Void(f"{num_open} of {limit} descriptors were open")
        return f"{count} connections came, {spare} descriptors were left, {num_open} of {limit} in use"

    return act


def scale_in(role: str) -> Act:
    """A pool shrinks by one under load, and grows again."""

    async def act(scene: Scene) -> str:
        cluster, before = scene.rig.cluster, {worker["incarnation"] for worker in scene.rig.workers(role)}
        scene.begins()
        for size in (1, 2):
            scaled = await asyncio.to_thread(cluster.cli, "scale", f"{role}={size}")
            assert scaled.returncode == 0, scaled.stderr
        scene.lifted()
        after = {worker["incarnation"] for worker in await asyncio.to_thread(scene.rig.workers, role)}
        return f"{len(before - after)} of {len(before)} {role} workers left, {len(after - before)} came"

    return act


def leaving_clients(count: int) -> Act:
    """Clients go at random moments, streaming and waiting for a whole answer alike."""

    async def act(scene: Scene) -> str:
        clients: Clients = scene.clients
        scene.begins()
        entries: list[Entry] = []
        for number in range(count):
            api = list(Api)[number % 3]
            question = max(clients.questions, key=lambda each: len(each.expected))
            entries.append(await clients.ask(question, api, is_leaving=True))
        scene.lifted()
        num_left = sum(entry.outcome is Outcome.LEFT for entry in entries)
        if num_left < count // 2:
            raise Void(f"{count - num_left} of {count} clients stayed")
        return f"{num_left} of {count} clients left before their answer was complete"

    return act


def slow_readers(count: int, for_s: float) -> Act:
    """Streams whose clients read nothing for a while get everything afterwards."""

    async def act(scene: Scene) -> str:
        clients: Clients = scene.clients
        question = max(clients.questions, key=lambda each: len(each.expected))
        scene.begins()
        entries = await asyncio.gather(*(clients.ask_slowly(question, for_s) for _ in range(count)))
        scene.lifted()
        assert problems(entries) == []
        return f"{count} clients with small buffers read nothing for {for_s:g} s"

    return act


def exhausted_pool() -> Act:
    """Sequences grow until the decode workers run out of blocks."""

    async def act(scene: Scene) -> str:
        def preempted() -> int:
            return sum(worker["num_preemptions"] for worker in scene.rig.workers("decode"))

        before = preempted()
        scene.begins()
        await scene.rig.until(lambda: preempted() > before, "a preemption", 60)
        scene.lifted()
        return f"{preempted() - before} sequences put back"

    return act
