"""The service without Ray, as four processes: what a machine with a GPU and no package registry can run.

A Redis, a router, a prefill and a decode worker that share the card; KV goes over pinned staging and gloo.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from deploy.local.redis_server import find_binary, start_redis
from tests.cluster.load import Case, random_cases, run_all, wrong
from tests.gpu.report import Report
from tests.ports import free_port
from tests.tiny_model import write_tiny_model

START_LIMIT_S = 120.0
STOP_LIMIT_S = 30.0


class BareService:
    """Processes by name, each with its log in `folder`."""

    def __init__(self, folder: Path, model: Path, attention: str, redis_url: str) -> None:
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.http_port = free_port()
        worker = {"dtype": "float32", "attention": attention, "transport": "gloo", "kv_cache_bytes": 1 << 28}
        self._config = folder / "pdserve.yaml"
        router = {"http_port": self.http_port, "grpc_port": free_port(), "local_prefill_max_tokens": 0}
        config = {"redis_url": redis_url, "router": router, "prefill_worker": worker, "decode_worker": worker}
        self._config.write_text(json.dumps(config | {"model": {"path": str(model)}}))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    def start(self, name: str) -> None:
        """ "router", or a worker: "prefill-0"."""
        role, _, _ = name.partition("-")
        arguments = ["router"] if name == "router" else ["worker", "--role", role, "--worker-id", name]
        command = [sys.executable, "-m", "deploy.cli", *arguments, "--config", str(self._config)]
        with (self._folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def kill(self, name: str) -> None:
        process = self._processes.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def stop(self) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def wait_until_ready(self) -> None:
        """Raises AssertionError with the ends of the logs."""
        deadline_s = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline_s and all(each.poll() is None for each in self._processes.values()):
            try:
                if httpx.get(f"{self.url}/ready", timeout=10).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.1)
        logs = {path.name: path.read_text(errors="replace")[-800:] for path in self._folder.glob("*.log")}
        raise AssertionError(f"not ready: {logs}")


@contextmanager
def bare_service(model: Path, attention: str) -> Iterator[BareService]:
    binary = find_binary()
    assert binary is not None, "no Redis or Valkey server is found"
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        redis = start_redis(binary, folder)
        assert redis.own is not None
        stack.callback(redis.own.process.stop)
        service = BareService(folder, model, attention, redis.url)
        stack.callback(service.stop)
        for name in ("router", "prefill-0", "decode-0"):
            service.start(name)
        service.wait_until_ready()
        yield service


def check_bare_service(report: Report, attention: str = "triton", num_cases: int = 16) -> None:
    """Tokens of one process; then with the prefill worker killed while prompts come, and another started."""
    os.environ.setdefault("PDSERVE_ROUTER_PAIR_GRACE_S", "120")
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder) / "tiny")
        with bare_service(model, attention) as service:
            report.check("exact without Ray", _fault_of(service, model, random_cases(num_cases, seed=8)))
            cases = random_cases(num_cases, seed=9, max_tokens=64)
            report.check("exact over a killed prefill worker", asyncio.run(_over_a_kill(service, model, cases)))


def _fault_of(service: BareService, model: Path, cases: list[Case]) -> str | None:
    faults = wrong(model, cases, asyncio.run(run_all(service.url, model.name, cases)))
    return f"{len(faults)} of {len(cases)}, first: {faults[0][:300]}" if faults else None


async def _over_a_kill(service: BareService, model: Path, cases: list[Case]) -> str | None:
    load = asyncio.create_task(run_all(service.url, model.name, cases))
    async with httpx.AsyncClient(timeout=60) as client:
        while not load.done():
            if (await client.get(f"{service.url}/admin/v1/state")).json()["num_running"]:
                break
    if load.done():
        return "all was over before a worker was killed"
    service.kill("prefill-0")
    service.start("prefill-1")
    faults = wrong(model, cases, await load)
    return f"{len(faults)} of {len(cases)}, first: {faults[0][:300]}" if faults else None
