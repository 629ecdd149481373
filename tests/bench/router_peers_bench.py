"""Rust routers that pass bytes on, in front of an HTTP server that answers at once: latency added, and rate.

The same prompts as `tests.bench.router_bench`. What they do is less: no tokenizing, no placement by cached blocks on
two workers, no text. `install` puts them under build/peers/routers.
"""

import asyncio
import contextlib
import http.client
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvloop

from tests.bench import router_bench
from tests.bench.failures import sparing
from tests.bench.router_bench import NUM_CONNECTIONS, Rig
from tests.bench.router_clients import HttpClient

HOME = Path("build/peers/routers")
PACKAGES = ("sglang-router==0.3.2", "vllm-router==0.1.17", "smg==1.13.0")
PEERS = {
    "sglang-router": ("-m", "sglang_router.launch_router", "--policy", "cache_aware"),
    "vllm-router": ("-m", "vllm_router.launch_router", "--policy", "cache_aware"),
    "smg": ("-m", "smg.launch_router", "--policy", "cache_aware"),
}
NUM_LATENCIES, NUM_LOADED, WARM_UP, ANSWER_TRIES = 300, 3000, 48, 150
SCALE = 0.5  # of our router's benchmark
_CASE = router_bench.CASES[0].name
METRICS = (
    *(f"router, {_CASE}: added to the last byte, p{percent}" for percent in (50, 99)),
    *(f"router, {NUM_CONNECTIONS} connections, {_CASE}: {what}" for what in ("per core", "as measured")),
)


def is_installed() -> bool:
    """The marker tells which versions."""
    marker = HOME / "installed"
    return marker.exists() and marker.read_text().split() == list(PACKAGES)


def install() -> None:
    """Idempotent."""
    if is_installed():
        return
    subprocess.run([sys.executable, "-m", "venv", str(HOME)], check=True)
    subprocess.run([str(HOME / "bin" / "pip"), "install", "--quiet", *PACKAGES], check=True)
    (HOME / "installed").write_text(" ".join(PACKAGES))


def run() -> list[dict[str, Any]]:
    """Ours beside each peer's, in one run; none when they are not installed."""
    if not is_installed():
        return []
    peers = _peer_figures()
    ours = {row["metric"]: row for row in router_bench.run(scale=SCALE)}
    return [
        ours[metric] | {"peers": {name: figures[idx] for name, figures in peers.items()}}
        for idx, metric in enumerate(METRICS)
    ]


def _peer_figures() -> dict[str, tuple[float, ...]]:
    """What METRICS name, of each peer."""
    figures = {}
    with _child([sys.executable, "-m", "tests.bench.http_stub"], stdout=subprocess.PIPE) as stub:
        assert stub.stdout is not None
        stub_port = int(stub.stdout.readline())
        for name, command in PEERS.items():
            with (
                sparing(name),
                _peer(command, stub_port) as rig,
                asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
            ):
                figures[name] = runner.run(_measure(rig, stub_port))
    return figures


async def _measure(rig: Rig, stub_port: int) -> tuple[float, ...]:
    await _first_answer(rig)
    await _load(rig, WARM_UP)
    through, direct = await _open(rig.port), await _open(stub_port)
    pairs = [(await _ask(through, rig), await _ask(direct, rig)) for _ in range(NUM_LATENCIES)]
    ordered, alone_s = sorted(pair[0] for pair in pairs), statistics.median(pair[1] for pair in pairs)
    wall_s, processor_s = await _load(rig, NUM_LOADED)
    added_s = [ordered[NUM_LATENCIES * percent // 100] - alone_s for percent in (50, 99)]
    return *(1e3 * each_s for each_s in added_s), NUM_LOADED / processor_s, NUM_LOADED / wall_s


async def _first_answer(rig: Rig) -> None:
    """Some are healthy before they know their worker's model, and answer 404 until then."""
    for _ in range(ANSWER_TRIES):
        with contextlib.suppress(AssertionError, OSError, asyncio.IncompleteReadError):
            await _ask(await _open(rig.port), rig)
            return
        await asyncio.sleep(0.2)
    await _ask(await _open(rig.port), rig)


async def _load(rig: Rig, num_requests: int) -> tuple[float, float]:
    """Seconds by the wall and of the peer's processor time, over 16 connections."""
    clients = [await _open(rig.port) for _ in range(NUM_CONNECTIONS)]
    before_s, started_s = rig.processor_s(), time.perf_counter()
    await asyncio.gather(*(_ask_often(client, rig, num_requests // NUM_CONNECTIONS) for client in clients))
    return time.perf_counter() - started_s, rig.processor_s() - before_s


async def _open(port: int) -> HttpClient:
    client = HttpClient(port, model="stub")
    await client.open()
    return client


async def _ask_often(client: HttpClient, rig: Rig, num_requests: int) -> None:
    for _ in range(num_requests):
        await _ask(client, rig)


async def _ask(client: HttpClient, rig: Rig) -> float:
    return (await client.complete(rig.prompt(), 1, stream=False)).last_s


@contextlib.contextmanager
def _peer(command: tuple[str, ...], stub_port: int) -> Iterator[Rig]:
    port = _free_port()
    arguments = [*command, "--host", "127.0.0.1", "--port", str(port), "--worker-urls", f"http://127.0.0.1:{stub_port}"]
    arguments += ["--prometheus-port", str(_free_port())]
    with _child([str(HOME.absolute() / "bin" / "python"), *arguments]) as process:
        _await_ready(port)
        yield Rig(port, process.pid, {})


@contextlib.contextmanager
def _child(command: list[str], stdout: int = subprocess.DEVNULL) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, stdout=stdout, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _await_ready(port: int) -> None:
    for _ in range(300):
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        time.sleep(0.1)
    raise TimeoutError("the peer did not become ready")
