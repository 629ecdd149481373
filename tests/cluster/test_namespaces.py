"""Two routers, two prefill and two decode workers and a Redis, each on a host of its own: `pdserve router` and
`pdserve worker`, as on machines without Ray. (Ray places processes and carries no token; across namespaces it would
only add its own ports.)
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.values.config import RouterSettings
from tests.cluster.load import Case, random_cases, run_all, stream, wrong
from tests.cluster.namespaces import Host, OnHost, folder, hosts, why_not
from tests.redis_box import binaries

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "namespaces can be made")

ROUTERS, WORKERS = ("router-a", "router-b"), ("prefill-0", "prefill-1", "decode-0", "decode-1")
START_LIMIT_S = 120.0
# Silence of a host is noticed by both sides within the router's limit; the rest is slack for a busy machine.
LOST_LIMIT_S = 15 * RouterSettings().worker_silence_s
BLOCKS = ("kv_blocks_used", "kv_blocks_held")
NUM_STREAMS = 8
LONG = Case(tuple(range(3, 103)), seed=5, max_tokens=400)


class Site:
    """The cluster across the hosts. What looks at it runs on the host `client`."""

    def __init__(self, found: dict[str, Host], logs: Path, model: Path) -> None:
        self.hosts = found
        self.client = OnHost(found["client"])
        self._logs = logs
        self._model = model
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        redis = [binaries()[0], "--bind", self.hosts["redis"].address, "--protected-mode", "no", "--save", ""]
        self._start("redis", redis)
        for name in WORKERS:
            self._start(name, self._pdserve("worker", name, "--role", name.partition("-")[0], "--worker-id", name))
        for name in ROUTERS:
            self._start(name, self._pdserve("router", name))
        for name in ROUTERS:
            self.wait(name, has_all_workers)

    def url(self, router: str) -> str:
        return f"http://{self.hosts[router].address}:8000"

    def state(self, router: str) -> dict[str, Any]:
        reply = self.client.call(lambda: httpx.get(f"{self.url(router)}/admin/v1/state", timeout=60))
        reply.raise_for_status()
        state: dict[str, Any] = reply.json()
        return state

    def wait(self, router: str, is_so: Callable[[dict[str, Any]], object], limit_s: float = START_LIMIT_S) -> None:
        """Return when the router's state is as it should be."""
        deadline_s, state = time.monotonic() + limit_s, {}
        while time.monotonic() < deadline_s:
            for name, process in self._processes.items():
                assert process.poll() is None, f"{name} ended:\n{self.log(name)[-3000:]}"
            with contextlib.suppress(httpx.HTTPError):
                state = self.state(router)
                if is_so(state):
                    return
            time.sleep(0.1)
        raise AssertionError(f"not so after {limit_s} s: {state}")

    def wait_until_idle(self, router: str, limit_s: float = LOST_LIMIT_S) -> None:
        self.wait(
            router, lambda state: all(not worker[kind] for worker in state["workers"] for kind in BLOCKS), limit_s
        )

    def wait_for_log(self, name: str, *parts: str) -> None:
        """Return when a line of the log has all parts."""

        def is_so(state: object) -> bool:
            return any(all(part in line for part in parts) for line in self.log(name).splitlines())

        self.wait("router-a", is_so, LOST_LIMIT_S)

    def kill(self, name: str) -> None:
        process = self._processes.pop(name)
        process.kill()
        process.wait(60)

    def log(self, name: str) -> str:
        return (self._logs / f"{name}.log").read_text(errors="replace")

    def close(self) -> None:
        self.client.close()
        for process in self._processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self._processes.values():
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(60)

    def _pdserve(self, command: str, name: str, *options: str) -> list[str]:
        host = ("--host", self.hosts[name].address, "--insecure", "--model", str(self._model))
        redis = ("--redis-url", f"redis://{self.hosts['redis'].address}:6379/0")
        return [sys.executable, "-m", "deploy.cli", command, *host, *redis, *options]

    def _start(self, name: str, command: list[str]) -> None:
        env = {**os.environ, "PDSERVE_ROUTER_ID": name, "PDSERVE_ROUTER_LOCAL_PREFILL_MAX_TOKENS": "0"}
        for pool in ("PREFILL_WORKER", "DECODE_WORKER"):
            env |= {f"PDSERVE_{pool}_DTYPE": "float32", f"PDSERVE_{pool}_NUM_THREADS": "1"}
        env |= {"PDSERVE_INSECURE": "true", "OMP_NUM_THREADS": "1"}
        self._processes[name] = self.hosts[name].popen(command, self._logs / f"{name}.log", env)


@pytest.fixture(scope="module")
def site(tiny_model: Path) -> Iterator[Site]:
    with folder() as logs, hosts("redis", *ROUTERS, *WORKERS, "client") as found:
        opened = Site(found, logs, tiny_model)
        try:
            opened.start()
            yield opened
        finally:
            opened.close()


async def test_kv_crosses_from_host_to_host_and_every_answer_is_exact(site: Site, tiny_model: Path) -> None:
    """What arrives at a decode worker's interface is at least the KV; its loopback carries none of it."""
    before = {name: received(site.hosts[name]) for name in WORKERS}
    cases = random_cases(16, seed=71)
    halves = [site.client.run(lambda url=site.url(name): run_all(url, "tiny", cases, at_once=4)) for name in ROUTERS]
    for answers in [await half for half in halves]:
        assert wrong(tiny_model, cases, answers) == []
    num_bytes = {name: 0 for name in WORKERS}
    for router in ROUTERS:
        for record in records(site, router):
            assert not record["attempts"][-1]["is_local"]
            num_bytes[record["attempts"][-1]["decode_worker"].partition("#")[0]] += record["timings"]["kv_bytes"]
    for name in ("decode-0", "decode-1"):
        (eth0, lo), (eth0_before, lo_before) = received(site.hosts[name]), before[name]
        assert num_bytes[name] > 100_000
        assert eth0 - eth0_before >= num_bytes[name]
        assert lo - lo_before < num_bytes[name] / 10
        prefill = {site.hosts[each].address for each in ("prefill-0", "prefill-1")}
        assert prefill <= site.hosts[name].peers()


async def test_each_router_knows_the_other_by_an_address_that_leads_there(site: Site) -> None:
    for asked in ROUTERS:
        site.wait(asked, lambda state: len(state["routers"]) == len(ROUTERS), 60)
        routers = {router["router_id"]: router["http_url"] for router in site.state(asked)["routers"]}
        assert routers == {name: site.url(name) for name in ROUTERS}


async def test_a_router_cut_off_the_network_gives_back_its_blocks_and_serves_again_when_it_is_back(
    site: Site, tiny_model: Path
) -> None:
    """1. load through router-b; 2. its cable is out: no error is seen, and no packet ends a connection;
    3. every worker finds it lost by itself and has its blocks back; 4. the cable is in: it finds them and serves."""
    async with load_until_broken(site, "router-b") as broken:
        site.hosts["router-b"].unplug()
        began_s = time.monotonic()
        try:
            assert isinstance(await broken, BaseException)
            for worker in WORKERS:
                await asyncio.to_thread(site.wait_for_log, worker, "router_disconnected", "router-b")
                print(f"{worker} lost the router {time.monotonic() - began_s:.1f} s after the cable was pulled")
            await asyncio.to_thread(site.wait_until_idle, "router-a")
        finally:
            site.hosts["router-b"].plug_in()
    await asyncio.to_thread(site.wait, "router-b", has_all_workers)
    cases = random_cases(6, seed=72)
    answers = await site.client.run(lambda: run_all(site.url("router-b"), "tiny", cases))
    assert wrong(tiny_model, cases, answers) == []


async def test_when_a_router_dies_the_clients_of_the_other_notice_nothing(site: Site, tiny_model: Path) -> None:
    """1. load on both; 2. kill -9 router-b's process; 3. every answer of router-a is exact; 4. all blocks are back,
    and router-a knows that it is alone."""
    cases = random_cases(12, seed=73, max_tokens=100) * 6
    other = OnHost(site.hosts["client"])
    try:
        async with load_until_broken(site, "router-b") as broken:
            load = asyncio.create_task(other.run(lambda: run_all(site.url("router-a"), "tiny", cases, at_once=8)))
            await asyncio.to_thread(site.wait, "router-a", lambda state: state["num_running"], 60)
            site.kill("router-b")
            assert isinstance(await broken, BaseException)
            assert wrong(tiny_model, cases, await load) == []
    finally:
        other.close()
    await asyncio.to_thread(site.wait_until_idle, "router-a")
    names = lambda state: [router["router_id"] for router in state["routers"]]  # noqa: E731 - a name for a look
    await asyncio.to_thread(site.wait, "router-a", lambda state: names(state) == ["router-a"], 60)


@asynccontextmanager
async def load_until_broken(site: Site, router: str) -> AsyncIterator["asyncio.Task[BaseException]"]:
    """Long streams through a router, one after another, until one breaks; entered when they run."""
    client = OnHost(site.hosts["client"])
    broken = asyncio.create_task(client.run(lambda: first_error(site.url(router))))
    try:
        await asyncio.to_thread(site.wait, router, lambda state: state["num_running"] >= NUM_STREAMS / 2, 60)
        yield broken
    finally:
        await asyncio.wait({broken})
        client.close()


async def first_error(url: str) -> BaseException:
    """What breaks the first stream; one that says nothing for some seconds is broken."""
    async with httpx.AsyncClient(timeout=3) as client:

        async def again_and_again() -> None:
            while True:
                await stream(client, url, "tiny", LONG)

        tasks = [asyncio.create_task(again_and_again()) for _ in range(NUM_STREAMS)]
        try:
            await asyncio.gather(*tasks)
        except (httpx.HTTPError, AssertionError) as error:
            return error
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    raise AssertionError("the streams never end")


def has_all_workers(state: dict[str, Any]) -> bool:
    return sum(worker["state"] == "ready" for worker in state["workers"]) == len(WORKERS)


def records(site: Site, router: str) -> list[dict[str, Any]]:
    reply = site.client.call(lambda: httpx.get(f"{site.url(router)}/admin/v1/requests", timeout=60))
    found: list[dict[str, Any]] = reply.json()["requests"]
    return found


def received(host: Host) -> tuple[int, int]:
    """Bytes that came in through (eth0, lo)."""
    return host.counter("eth0", "rx_bytes"), host.counter("lo", "rx_bytes")
