"""A real cluster for a test: `pdserve up` in a process of its own, on free ports, stopped and audited at the end."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from common.tls.identity import Component, Identity
from deploy.cli.audit import run_audit
from tests.certificates import tls_settings
from tests.ports import free_port

START_TIMEOUT_S = 180.0
IDLE_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 60.0


class Cluster:
    """Handles of a running cluster. Workers' pids come from `/admin/v1/state`."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        http_port: int,
        grpc_port: int,
        log_path: Path,
        tls: Path | None = None,
    ) -> None:
        self.process = process
        self.http_port, self.grpc_port = http_port, grpc_port
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{http_port}"
        self.grpc = f"{'https://' if tls else ''}127.0.0.1:{grpc_port}"
        self.log_path = log_path
        self.tls = tls

    def identity(self, component: str) -> Identity:
        """A component of this cluster."""
        return Identity(component, "pdserve", tls_settings(self.tls) if self.tls else None)

    def get(self, path: str) -> Any:
        key = os.environ.get("PDSERVE_ROUTER_ADMIN_KEY", "")
        reply = httpx.get(f"{self.url}{path}", headers={"x-admin-key": key}, timeout=60)
        reply.raise_for_status()
        return reply.json()

    def logs(self) -> str:
        """What every process of the cluster has written so far."""
        own = self.log_path.read_text(errors="replace")
        said = re.search(r"logs are below (\S+) while", own)
        assert said is not None, own
        files = [
            path for path in Path(said[1]).rglob("*") if path.is_file() and path.suffix in (".log", ".out", ".err")
        ]
        assert any(path.name == "router.log" for path in files)
        return own + "".join(path.read_text(errors="replace") for path in files)

    def log_tail(self) -> str:
        return self.log_path.read_text(errors="replace")[-8000:] if self.log_path.exists() else ""

    def workers(self, role: str | None = None) -> list[dict[str, Any]]:
        """Workers as the router sees them."""
        return [worker for worker in self.get("/admin/v1/state")["workers"] if role in (None, worker["role"])]

    def cli(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `pdserve ...` against this cluster."""
        env = {**os.environ, "PDSERVE_SERVER": self.grpc, "PDSERVE_URL": self.url}
        command = [sys.executable, "-m", "deploy.cli", *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=env, timeout=180, check=False)

    def wait_until_idle(self) -> list[dict[str, Any]]:
        """Wait until nothing is used or held; returns the workers. Raises with the last state after a bound."""
        deadline_s = time.monotonic() + IDLE_TIMEOUT_S
        while True:
            workers = self.workers()
            busy = [w for w in workers if w["kv_blocks_used"] or w["kv_blocks_held"] or w["running"] or w["waiting"]]
            if workers and not busy:
                return workers
            if time.monotonic() > deadline_s:
                raise AssertionError(f"not idle after {IDLE_TIMEOUT_S} s: {json.dumps(busy or workers)}")
            time.sleep(0.1)

    def audit(self) -> None:
        """After any test: no block used or held, and every block accounted for."""
        for worker in self.wait_until_idle():
            states = sum(worker[f"kv_blocks_{state}"] for state in ("used", "cached", "free", "held"))
            assert states == worker["kv_blocks_total"], worker
        assert run_audit(self.url, as_json=True, identity=self.identity(Component.OPERATOR)) == 0

    def wait_for(self, part: Callable[[Any], Any], is_so: Callable[[Any], object], timeout_s: float = 60.0) -> Any:
        """That part of `/admin/v1/state`, once it is as it should be."""
        deadline_s = time.monotonic() + timeout_s
        while not is_so(found := part(self.get("/admin/v1/state"))):
            if time.monotonic() > deadline_s:
                raise AssertionError(f"not so after {timeout_s} s: {found}")
            time.sleep(0.05)
        return found

    def wait_for_index(self, worker_id: str, num_blocks: int, timeout_s: float = 60.0) -> None:
        """Wait until the router's copy of the index has so many blocks of the worker."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            with httpx.stream("GET", f"{self.url}/admin/v1/events", timeout=60) as reply:
                snapshot = next(json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: "))
            rows = {row["worker_id"]: row["num_blocks"] for row in snapshot["index"] or ()}
            if rows.get(worker_id, 0) >= num_blocks:
                return
            assert time.monotonic() < deadline_s, f"index: {rows}"
            time.sleep(0.1)

    def wait_for_pools(self, prefill: int, decode: int, timeout_s: float = 120.0) -> None:
        """Wait until exactly so many workers of each role are ready."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            ready = [worker["role"] for worker in self.workers() if worker["state"] == "ready"]
            if (ready.count("prefill"), ready.count("decode")) == (prefill, decode):
                return
            time.sleep(0.2)
        raise AssertionError(f"pools are not {prefill}+{decode}: {self.workers()}")


@contextmanager
def running_cluster(
    model: str | Path,
    *options: str,
    prefill: int = 1,
    decode: int = 1,
    config: dict[str, Any] | None = None,
    ports: tuple[int, int] | None = None,
    tls: Path | None = None,
) -> Iterator[Cluster]:
    """Start `pdserve up`, wait until it is ready, and stop it by SIGTERM; nothing may be left behind.

    `ports` are of HTTP and gRPC, by default free ones. `tls`: a directory of certificates, which the environment names
    to clients (`tests.certificates.trusting`).
    """
    with tempfile.TemporaryDirectory(prefix="pdserve-test-") as folder:
        command = _command(Path(folder), model, options, prefill, decode, config)
        log_path = Path(folder) / "up.log"
        http_port, grpc_port = ports or (free_port(), free_port())
        command += ["--http-port", str(http_port), "--grpc-port", str(grpc_port)]
        command += ["--tls", str(tls)] if tls else []
        with log_path.open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        cluster = Cluster(process, http_port, grpc_port, log_path, tls)
        try:
            _wait_until_ready(cluster)
            cluster.wait_for_pools(prefill, decode)
            yield cluster
            cluster.audit()
        except BaseException:
            print(cluster.log_tail())
            raise
        finally:
            _stop(process)


def descendants(pid: int) -> list[psutil.Process]:
    """Every process below `pid`, or none when it is gone."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _command(
    folder: Path, model: str | Path, options: tuple[str, ...], prefill: int, decode: int, config: dict[str, Any] | None
) -> list[str]:
    command = [sys.executable, "-m", "deploy.cli", "up", "--model", str(model), *options]
    command += ["--prefill", str(prefill), "--decode", str(decode)]
    if config is not None:
        path = folder / "pdserve.yaml"
        path.write_text(json.dumps(config))  # JSON is YAML
        command += ["--config", str(path)]
    return command


def _wait_until_ready(cluster: Cluster) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if cluster.process.poll() is not None:
            raise AssertionError(f"pdserve up ended with {cluster.process.returncode}")
        try:
            if httpx.get(f"{cluster.url}/ready", timeout=60).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise AssertionError(f"not ready after {START_TIMEOUT_S} s")


def _stop(process: subprocess.Popen[bytes]) -> None:
    children = descendants(process.pid)
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(60)
        raise AssertionError(f"pdserve up did not stop within {STOP_TIMEOUT_S} s of SIGTERM") from None
    _, alive = psutil.wait_procs(children, timeout=60)
    for child in alive:
        child.kill()
    assert not alive, f"left running: {[child.cmdline() for child in alive]}"
