"""The cluster under fault: who its processes are, what its connections are, and what it is doing right now."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import redis

from common.tls.identity import Component, Identity
from common.values.config import ClusterConfig
from common.values.messages import BlockHolder
from deploy.cli.audit import ask
from tests.chaos import sockets
from tests.chaos.instruments import Instruments, instruments
from tests.cluster.cluster import Cluster, descendants, running_cluster

Worker = dict[str, Any]

# Shorter than the defaults, so that a table of faults takes minutes; not so short that a busy machine looks dead. Links
# are of sockets, which can be dropped, slowed and reset; memory has no such faults.
_WORKER: dict[str, Any] = {
    "dtype": "float32",
    "transport": "gloo",
    "link_timeout_s": 4.0,
    "max_step_s": 3.0,
    "max_num_batched_tokens": 64,
}
CONFIG: dict[str, Any] = {
    "router": {"worker_silence_s": 3.0, "local_prefill_max_tokens": 0, "max_num_queued": 64, "keep_requests": 20_000},
    "prefill_worker": _WORKER,
    "decode_worker": _WORKER,
}
POLL_S = 0.005


class Void(AssertionError):
    """The fault did not happen, or cannot be made on this machine: the row says nothing."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A cluster that rows share: pools, what differs from `CONFIG`, and whether its processes take orders."""

    prefill: int = 2
    decode: int = 2
    config: tuple[tuple[str, str, Any], ...] = ()
    options: tuple[str, ...] = ()
    is_instrumented: bool = False

    def merged(self) -> dict[str, Any]:
        merged = {section: dict(values) for section, values in CONFIG.items()}
        for section, name, value in self.config:
            merged.setdefault(section, {})[name] = value
        ClusterConfig.model_validate(merged)
        return merged


@dataclass(slots=True)
class Rig:
    """One running cluster. `stopped` are pids that we froze and must let go."""

    cluster: Cluster
    shape: Shape
    model: Path
    instruments: Instruments | None = None
    stopped: set[int] = field(default_factory=set)

    @property
    def identity(self) -> Identity:
        """Who asks the workers."""
        return self.cluster.identity(Component.OPERATOR)

    # ---- who -------------------------------------------------------------------------------------------

    def router_pid(self) -> int:
        return self._pid_of("deploy.cli router")

    def redis_pid(self) -> int:
        return self._pid_of("redis-server", "valkey-server")

    def up_pid(self) -> int:
        """Of `pdserve up`, which manages the pools."""
        return self.cluster.process.pid

    def ray_control_pid(self) -> int:
        return self._pid_of("gcs_server")

    def router_config(self) -> dict[str, Any]:
        """The file that the router was started with; it has the URL of Redis."""
        command = psutil.Process(self.router_pid()).cmdline()
        loaded: dict[str, Any] = json.loads(Path(command[command.index("--config") + 1]).read_text())
        return loaded

    def redis(self) -> redis.Redis:
        """A client; close it."""
        return redis.Redis.from_url(self.router_config()["redis_url"], socket_timeout=5)

    def _pid_of(self, *marks: str) -> int:
        for child in descendants(self.cluster.process.pid):
            try:
                line = " ".join(child.cmdline())
            except psutil.NoSuchProcess:
                continue
            if any(mark in line for mark in marks) and "reaper" not in line:
                return child.pid
        raise Void(f"no process {marks}")

    def workers(self, role: str | None = None) -> list[Worker]:
        return sorted(self.cluster.workers(role), key=lambda worker: str(worker["worker_id"]))

    async def order(self, pid: int, plant: str, **arguments: object) -> Any:
        """Have a process of an instrumented cluster do something to itself."""
        assert self.instruments is not None, "the row needs an instrumented shape"
        return await asyncio.to_thread(self.instruments.order, pid, plant, **arguments)

    # ---- when ------------------------------------------------------------------------------------------

    async def until(self, is_so: Callable[[], object], what: str, limit_s: float = 30.0) -> Any:
        """The first true value of `is_so`, which may block a little; Void after `limit_s`."""
        deadline_s = time.monotonic() + limit_s
        while True:
            try:
                if value := await asyncio.to_thread(is_so):
                    return value
            except (httpx.HTTPError, psutil.NoSuchProcess):
                pass
            if time.monotonic() > deadline_s:
                raise Void(f"not within {limit_s:g} s: {what}")
            await asyncio.sleep(POLL_S)

    async def catch(self, role: str, phases: Collection[str]) -> Worker:
        """Wait until a worker of the role holds blocks in one of these phases; that worker, at that moment."""
        workers = await asyncio.to_thread(self.workers, role)

        def caught() -> Worker | None:
            for worker in workers:
                if any(holder.phase in phases for holder in self.holders(worker)):
                    return worker
            return None

        found: Worker = await self.until(caught, f"a {role} worker with a holder in {sorted(phases)}")
        return found

    def holders(self, worker: Worker) -> tuple[BlockHolder, ...]:
        try:
            found = ask(worker, self.identity).audit
        except grpc.RpcError:
            return ()
        return () if found is None else tuple(found.holders)

    def answers(self, worker: Worker) -> bool:
        """Whether the worker's event loop is alive."""
        try:
            return ask(worker, self.identity).audit is not None
        except grpc.RpcError:
            return False

    async def until_whole(self, limit_s: float = 90.0) -> None:
        """Every worker of both pools is ready, in the router's eyes, and no dead one is counted."""
        wanted = (self.shape.prefill, self.shape.decode)

        def is_whole() -> bool:
            ready = [worker for worker in self.workers() if worker["state"] == "ready"]
            roles = [worker["role"] for worker in ready]
            alive = not any(is_gone(psutil.Process(worker["pid"])) for worker in ready)
            return alive and (roles.count("prefill"), roles.count("decode")) == wanted

        try:
            await self.until(is_whole, f"pools of {wanted}", limit_s)
        except Void as error:
            raise AssertionError(f"does not recover: {error}; {self.workers()}") from None

    # ---- links -----------------------------------------------------------------------------------------

    def router_links(self, worker: Worker) -> Any:
        return sockets.connections_between(self.router_pid(), worker["pid"], {port_of(worker)})

    def control_links(self, prefill: Worker, decode: Worker) -> Any:
        """The control streams of a handoff pair."""
        return sockets.connections_between(prefill["pid"], decode["pid"], {port_of(decode)})

    def kv_links(self, prefill: Worker, decode: Worker) -> Any:
        """Gloo's connections of a pair: neither the control stream nor the store, to which the decode worker talks."""
        own = {remote for _, _, remote in sockets.open_ports(decode["pid"])} & sockets.listening_ports(decode["pid"])
        servers = sockets.listening_ports(prefill["pid"]) | sockets.listening_ports(decode["pid"])
        return sockets.connections_between(prefill["pid"], decode["pid"], servers - own - {port_of(decode)})

    def rendezvous(self, decode: Worker) -> Any:
        """The socket on which a decode worker's store takes connections; only it talks to itself there."""
        own = {remote for _, _, remote in sockets.open_ports(decode["pid"])} & sockets.listening_ports(decode["pid"])
        return sockets.listeners(decode["pid"], own - {port_of(decode)})

    # ---- signals ---------------------------------------------------------------------------------------

    async def kill(self, pid: int) -> str:
        """SIGKILL; returns the proof."""
        process = psutil.Process(pid)
        os.kill(pid, signal.SIGKILL)
        await self.until(lambda: is_gone(process), f"end of {pid}", 10)
        return f"SIGKILL, pid {pid} is gone"

    @contextmanager
    def frozen(self, pid: int) -> Iterator[None]:
        """SIGSTOP until the block is left; a process that ended meanwhile stays ended."""
        process = psutil.Process(pid)
        process.suspend()
        self.stopped.add(pid)
        try:
            yield
        finally:
            self.stopped.discard(pid)
            with suppress(psutil.NoSuchProcess):
                process.resume()

    async def until_frozen(self, pid: int) -> str:
        await self.until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, f"{pid} in state T", 5)
        return f"SIGSTOP, pid {pid} in state T"

    # ---- numbers ---------------------------------------------------------------------------------------

    def counter(self, name: str, **labels: str) -> float:
        """Sum of a counter of the router over all label values that agree."""
        total = 0.0
        for line in httpx.get(f"{self.cluster.url}/metrics", timeout=10).text.splitlines():
            if line.startswith(f"{name}{{") and all(f'{key}="{value}"' in line for key, value in labels.items()):
                total += float(line.rpartition(" ")[2])
        return total

    def record(self, answer_id: str) -> dict[str, Any]:
        """What the router remembers of an ended request; nothing when it does not."""
        reply = httpx.get(f"{self.cluster.url}/admin/v1/requests/{answer_id}", timeout=10)
        found: dict[str, Any] = reply.json() if reply.status_code == 200 else {}
        return found


def is_gone(process: psutil.Process) -> bool:
    """Ended, or a zombie that was not waited for yet."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def port_of(worker: Worker) -> int:
    return int(str(worker["address"]).rpartition(":")[2])


@contextmanager
def running_rig(model: Path, shape: Shape) -> Iterator[Rig]:
    """Start the cluster, and stop it."""
    with ExitStack() as stack:
        inside = stack.enter_context(instruments()) if shape.is_instrumented else None
        with inside.in_environment() if inside is not None else nullcontext():
            pools: dict[str, Any] = {"prefill": shape.prefill, "decode": shape.decode}
            cluster = stack.enter_context(running_cluster(model, *shape.options, **pools, config=shape.merged()))
        yield Rig(cluster, shape, model, inside)


Act = Callable[["Scene"], Awaitable[str]]


@dataclass(slots=True)
class Scene:
    """What a fault acts on. It notes when the fault began and, if it lasts, when it was lifted."""

    rig: Rig
    clients: Any
    began_s: float = 0.0
    lifted_s: float = 0.0

    def begins(self) -> None:
        self.began_s = self.lifted_s = time.monotonic()

    def lifted(self) -> None:
        self.lifted_s = time.monotonic()
