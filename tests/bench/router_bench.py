"""The router's speed over workers that compute nothing: added latency, processor time per request, requests per second.

The router is the product's own process with its Redis, its tokenizer and both APIs; the workers are
`tests.bench.router_stub`. Added latency is what a client waits through the router less what it waits when it sends
the same messages to the workers itself, measured by turns. The floor of each is the same quantile of an HTTP server
that does nothing, in the same turns: what client, kernel and whatever else runs here take. Processor time is that of
the router's process, which runs in one thread but for gRPC's own, so 1000 ms over it is what one core does.
"""

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from common.checkpoint.demo_model import fetch_demo_model
from tests.bench.router_clients import DirectClient, HttpClient, Latency, direct_client
from tests.paths import ROOT
from tests.redis_box import binaries, redis_box

NUM_WORDS = 400
NUM_EVENTS = 33
NUM_CONNECTIONS = 16
STEP_S = 0.002
WARM_UP = 50
_ROUTER = """
import json, sys
from common.values.config import RouterConfig
from common.telemetry.logs import configure_logs
from router.app import run
configure_logs("router")
run(RouterConfig.model_validate_json(sys.argv[1]), on_ready=lambda ports: print(ports.http, flush=True))
"""
_WORDS = [
    "the",
    "of",
    "service",
    "block",
    "when",
    "a",
    "request",
    "arrives",
    "its",
    "prompt",
    "is",
    "cut",
    "into",
    "tokens",
    "and",
    "every",
    "full",
    "block",
    "has",
    "key",
]


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of request."""

    name: str
    num_tokens: int
    stream: bool


CASES = (
    Case("unary, 1 token", 1, stream=False),
    # Short, so that one request follows the other as above: after the 70 ms of a long one cores and caches are cold.
    Case("streamed, 2 events", 2, stream=True),
    Case(f"unary, {NUM_EVENTS} tokens", NUM_EVENTS, stream=False),
    Case(f"streamed, {NUM_EVENTS} events", NUM_EVENTS, stream=True),
)


@dataclass(slots=True)
class Rig:
    """The running processes, and where they listen."""

    port: int
    pid: int
    addresses: dict[str, str]
    floor_port: int = 0
    rng: random.Random = field(default_factory=lambda: random.Random(3))

    def prompt(self) -> str:
        """As many words as no prompt before: nothing is cached anywhere."""
        return " ".join(self.rng.choice(_WORDS) for _ in range(NUM_WORDS))

    def processor_s(self) -> float:
        """Time that the router's process has run so far: Linux names a process's clock by its number."""
        return time.clock_gettime((~self.pid << 3) | 2)


def run(router_path: str = "", scale: float = 1.0) -> list[dict[str, Any]]:
    """All figures, in under a minute at scale 1. `router_path`: another checkout whose router to measure."""
    with _rig(router_path) as rig, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_measure(rig, scale))


async def _measure(rig: Rig, scale: float) -> list[dict[str, Any]]:
    async with direct_client(rig.addresses) as direct:
        await _load(rig, CASES[0], WARM_UP)
        rows = []
        for case in CASES:
            num_requests = int(scale * (300 if case.num_tokens < NUM_EVENTS else 80))
            rows += _latency_rows(case, await _by_turns(rig, direct, case, num_requests))
        for case in CASES:
            rows += await _load(rig, case, int(scale * 1500))
        return rows


@dataclass(slots=True)
class Turns:
    """Latencies through the router, without it, and of a server that does nothing."""

    through: list[Latency] = field(default_factory=list)
    alone: list[Latency] = field(default_factory=list)
    floor: list[Latency] = field(default_factory=list)


async def _by_turns(rig: Rig, direct: DirectClient, case: Case, num_requests: int) -> Turns:
    """One after the other, on an otherwise idle router."""
    client, nothing = HttpClient(rig.port), HttpClient(rig.floor_port)
    turns = Turns()
    await client.open()
    await nothing.open()
    for _ in range(num_requests):
        prompt = rig.prompt()
        turns.through.append(await client.complete(prompt, case.num_tokens, stream=case.stream))
        turns.alone.append(await direct.generate(tuple(range(NUM_WORDS)), case.num_tokens))
        turns.floor.append(await nothing.complete(prompt, case.num_tokens, stream=case.stream))
    client.close()
    nothing.close()
    return turns


async def _load(rig: Rig, case: Case, num_requests: int) -> list[dict[str, Any]]:
    """Requests over 16 connections, each asking again as soon as it is answered."""
    prompts = iter([rig.prompt() for _ in range(num_requests)])
    clients = [HttpClient(rig.port) for _ in range(NUM_CONNECTIONS)]
    for client in clients:
        await client.open()
    before_s, started_s = rig.processor_s(), time.perf_counter()
    latencies = [one for some in await asyncio.gather(*(_ask(c, prompts, case) for c in clients)) for one in some]
    wall_s, processor_ms = time.perf_counter() - started_s, 1e3 * (rig.processor_s() - before_s) / num_requests
    for client in clients:
        client.close()
    assert len(latencies) == num_requests
    name = f"router, {NUM_CONNECTIONS} connections, {case.name}"
    return [
        _row(f"{name}: processor time", "ms/request", processor_ms, "lower"),
        _row(f"{name}: per core", "requests/s", 1e3 / processor_ms, "higher"),
        _row(f"{name}: as measured", "requests/s", num_requests / wall_s, "higher"),
    ]


async def _ask(client: HttpClient, prompts: Iterator[str], case: Case) -> list[Latency]:
    return [await client.complete(prompt, case.num_tokens, stream=case.stream) for prompt in prompts]


def _latency_rows(case: Case, turns: Turns) -> list[dict[str, Any]]:
    """Added to the whole answer, and to the first event of a stream: less the median without a router, p99 too."""
    rows = []
    for part in ("first", "last") if case.stream else ("last",):
        through, alone, floor = (
            sorted(1e3 * getattr(latency, f"{part}_s") for latency in latencies)
            for latencies in (turns.through, turns.alone, turns.floor)
        )
        for percent in (50, 99):
            added_ms = _quantile(through, percent) - _quantile(alone, 50)
            peers = {"whole": _quantile(through, percent), "without a router": _quantile(alone, percent)}
            name = f"router, {case.name}: added to the {part} byte, p{percent}"
            rows.append(_row(name, "ms", added_ms, "lower", peers) | {"floor": round(_quantile(floor, percent), 3)})
    return rows


def _quantile(ordered: list[float], percent: int) -> float:
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


def _row(metric: str, unit: str, ours: float, better: str, peers: dict[str, float] | None = None) -> dict[str, Any]:
    rounded = {name: round(value, 3) for name, value in (peers or {}).items()}
    return {"metric": metric, "unit": unit, "ours": round(ours, 3), "peers": rounded, "floor": None, "better": better}


@contextlib.contextmanager
def _rig(router_path: str) -> Iterator[Rig]:
    """Redis, the stub and the router, each a process of its own; all end with this."""
    directory = Path(tempfile.mkdtemp(prefix="router-bench-"))
    model = fetch_demo_model(lambda _: None)
    try:
        with redis_box(binaries()[0], directory) as redis, contextlib.ExitStack() as stack:
            stub = {"redis_url": redis.url, "namespace": "bench", "step_s": str(STEP_S)}
            _, addresses = stack.enter_context(_process(["-m", "tests.bench.router_stub", json.dumps(stub)]))
            config = {"model": {"path": str(model)}, "redis_url": redis.url, "namespace": "bench", "http_port": 0}
            command = ["-c", _ROUTER, json.dumps(config | {"grpc_port": 0})]
            pid, port = stack.enter_context(_process(command, router_path))
            _, floor_port = stack.enter_context(_process(["-m", "tests.bench.http_stub"]))
            _await_ready(int(port))
            yield Rig(int(port), pid, json.loads(addresses), int(floor_port))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def _process(arguments: list[str], path: str = "") -> Iterator[tuple[int, str]]:
    """A Python of ours: its pid and the line it prints once it is up."""
    root = path or str(ROOT)
    environment = {**os.environ, "PYTHONPATH": root}
    process = subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, cwd=root
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline().decode()
        assert line, f"{arguments[0]} ended before it was up"
        yield process.pid, line
    finally:
        process.terminate()
        process.wait(20)


def _await_ready(port: int) -> None:
    """Until the router has found both workers."""
    for _ in range(100):
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("GET", "/ready")
        is_ready = connection.getresponse().status == 200
        connection.close()
        if is_ready:
            return
        time.sleep(0.1)
    raise TimeoutError("the router found no workers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--router", default="", help="another checkout whose router to measure")
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of requests")
    arguments = parser.parse_args()
    print("load", os.getloadavg())
    for row in run(arguments.router, arguments.scale):
        print(f"{row['metric']:70} {row['ours']:10.3f} {row['unit']} {_beside(row)}")


def _beside(row: dict[str, Any]) -> str:
    beside = row["peers"] if row["floor"] is None else {"floor": row["floor"], **row["peers"]}
    return ", ".join(f"{name} {value:.3f}" for name, value in beside.items())


if __name__ == "__main__":
    main()
