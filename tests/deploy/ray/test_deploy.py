"""`pdserve deploy` on a Ray cluster that somebody else runs: workers outlive the controller, and --down ends them."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.deploy.ray.ray_cluster import RayCluster, ray_cluster
from tests.ports import free_port
from tests.redis_box import RedisBox, binaries, redis_box
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.cluster

LIMIT_S = 120.0
# What Ray's autoscaler has been asked for last.
REQUESTED = """
import json, sys, ray
from ray.experimental.internal_kv import _internal_kv_get
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
print((_internal_kv_get("autoscaler_resource_request") or b"[]").decode())
"""


@pytest.fixture(scope="module")
def ray() -> Iterator[RayCluster]:
    # Short: Ray puts sockets below it.
    temporary = tempfile.TemporaryDirectory(prefix="pdray-", dir="/tmp", ignore_cleanup_errors=True)
    with temporary as directory, ray_cluster(Path(directory)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisBox]:
    with redis_box(binaries()[0], tmp_path_factory.mktemp("redis")) as server:
        yield server


class Deployment:
    """A router and a configuration for `pdserve deploy`; controllers come and go."""

    def __init__(self, ray: RayCluster, redis_url: str, directory: Path) -> None:
        self.ray = ray
        self.log_path = directory / "deploy.log"
        self.config_path = directory / "pdserve.yaml"
        self.url = f"http://127.0.0.1:{free_port()}"
        worker = {"dtype": "float32", "kv_cache_bytes": 1 << 20}
        config = {
            "redis_url": redis_url,
            "namespace": "deployed",
            "model": {"path": str(write_tiny_model(directory / "tiny"))},
            "pools": {"prefill": 1, "decode": 1, "drain_grace_s": 5},
            "router": {"http_port": int(self.url.rpartition(":")[2]), "grpc_port": free_port()},
            "prefill_worker": worker,
            "decode_worker": worker,
        }
        self.config_path.write_text(json.dumps(config))  # JSON is YAML
        self.router = self._start("router")
        self.controller = self.start_controller()

    def start_controller(self, *options: str) -> "subprocess.Popen[bytes]":
        return self._start("deploy", "--ray-address", self.ray.address, *options)

    def next_controller(self, num_workers: int) -> None:
        """Start one and wait until it has the workers in hand: what it says in Redis may be its predecessor's word."""
        num_ready = self.log().count(": ready after ") + num_workers
        self.controller = self.start_controller()
        until(lambda: self.log().count(": ready after ") >= num_ready)

    def end_controller(self, number: signal.Signals) -> int:
        self.controller.send_signal(number)
        return self.controller.wait(LIMIT_S)

    def pdserve(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        env = {**self.ray.env, "PDSERVE_URL": self.url}
        command = [sys.executable, "-m", "deploy.cli", *arguments]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = httpx.get(f"{self.url}/admin/v1/state", timeout=60).json()
        return state

    def pids(self, role: str) -> set[int]:
        """Of the workers that are ready."""
        workers = [worker for worker in self.state()["workers"] if worker["role"] == role]
        return {worker["pid"] for worker in workers if worker["state"] == "ready"}

    def answers(self) -> bool:
        body = {"model": "tiny", "prompt": "hello there", "max_tokens": 4}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=LIMIT_S).status_code == 200

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def _start(self, *arguments: str) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "deploy.cli", *arguments, "--config", str(self.config_path)]
        with self.log_path.open("ab") as log:
            return subprocess.Popen(command, env=self.ray.env, stdout=log, stderr=subprocess.STDOUT)

    def close(self) -> None:
        for process in (self.controller, self.router):
            process.kill()
            process.wait()


@pytest.fixture
def deployment(ray: RayCluster, box: RedisBox, tmp_path: Path) -> Iterator[Deployment]:
    until(lambda: ray_answers(ray))
    deployment = Deployment(ray, box.url, tmp_path)
    try:
        yield deployment
    finally:
        print(deployment.log()[-6000:])
        deployment.close()


def ray_answers(ray: RayCluster) -> bool:
    assert not ray.has_ended(), ray.log()
    command = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", ray.address]
    return subprocess.run(command, env=ray.env, capture_output=True, check=False).returncode == 0


def requested_of_ray(ray: RayCluster) -> list[Any]:
    command = [sys.executable, "-c", REQUESTED, ray.address]
    asked = subprocess.run(command, env=ray.env, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    requested: list[Any] = json.loads(asked.stdout)
    return requested


def test_workers_outlive_the_controller_and_the_next_one_goes_on_with_them(
    deployment: Deployment, box: RedisBox
) -> None:
    """1. 1+1 are deployed and serve, on their node's address; 2. the controller is killed: they go on serving; 3. the
    next controller finds them and scales; 4. one changes its role, no node is asked for, and the next controller knows
    it by its new one; 5. it ends by SIGTERM, and the size that it was given lasts; 6. a dead worker is replaced;
    7. --down ends them all.
    """
    until(lambda: is_ready(deployment))
    assert deployment.answers()
    prefill, decode = deployment.pids("prefill"), deployment.pids("decode")
    assert all(worker["address"].startswith("127.0.0.1:") for worker in deployment.state()["workers"])

    deployment.end_controller(signal.SIGKILL)
    assert deployment.answers()

    deployment.next_controller(2)
    scaled = deployment.pdserve("scale", "decode=2")
    assert scaled.returncode == 0, scaled.stderr
    assert deployment.pids("prefill") == prefill
    assert decode < deployment.pids("decode")
    assert requested_of_ray(deployment.ray) == [{"pd_prefill": 1}, {"pd_decode": 1}, {"pd_decode": 1}]

    check_a_role_change(deployment)

    assert deployment.end_controller(signal.SIGTERM) == 0
    assert "the controller ends (SIGTERM); the workers go on" in deployment.log()
    refused = deployment.pdserve("scale", "decode=1")
    assert "no pool controller runs" in refused.stderr

    decode = deployment.pids("decode")
    deployment.next_controller(3)
    until(lambda: pool(deployment, "decode").get("ready") == 2)
    assert deployment.pids("decode") == decode
    victim = min(decode)
    os.kill(victim, signal.SIGKILL)
    until(lambda: len(deployment.pids("decode") - {victim}) == 2)
    assert decode - {victim} < deployment.pids("decode")
    assert deployment.answers()

    workers = deployment.pids("prefill") | deployment.pids("decode")
    deployment.end_controller(signal.SIGTERM)
    down = deployment.start_controller("--down")
    assert down.wait(LIMIT_S) == 0
    until(lambda: not any(is_running(pid) for pid in workers))
    kept = json.loads(str(box.client().get("deployed:pools:kept"), "utf-8"))  # type: ignore[arg-type]
    assert kept["desired"] == {"prefill": 1, "decode": 2}


def check_a_role_change(deployment: Deployment) -> None:
    """From 1+2 to 2+1 and back, with another controller in between."""
    everybody = deployment.pids("prefill") | deployment.pids("decode")
    requested = requested_of_ray(deployment.ray)
    moved = deployment.pdserve("scale", "--prefill", "2", "--decode", "1")
    assert moved.returncode == 0, moved.stderr
    deployment.end_controller(signal.SIGKILL)
    deployment.next_controller(3)
    until(lambda: (pool(deployment, "prefill").get("ready"), pool(deployment, "decode").get("ready")) == (2, 1))
    assert deployment.pids("prefill") | deployment.pids("decode") == everybody
    moved = deployment.pdserve("scale", "--prefill", "1", "--decode", "2")
    assert moved.returncode == 0, moved.stderr
    assert deployment.pids("prefill") | deployment.pids("decode") == everybody
    assert requested_of_ray(deployment.ray) == requested
    assert deployment.answers()


def is_ready(deployment: Deployment) -> bool:
    assert deployment.controller.poll() is None, deployment.log()
    assert deployment.router.poll() is None, deployment.log()
    try:
        return httpx.get(f"{deployment.url}/ready", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def pool(deployment: Deployment, role: str) -> dict[str, Any]:
    """What the controller says of a pool; empty while none runs."""
    pools: dict[str, Any] = deployment.state()["pools"] or {}
    found: dict[str, Any] = pools.get(role, {})
    return found


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def test_without_a_cluster_at_the_address_it_says_so(box: RedisBox) -> None:
    command = [sys.executable, "-m", "deploy.cli", "deploy", "--ray-address", "127.0.0.1:1", "--redis-url", box.url]
    env = {**os.environ, "PDSERVE_MODEL_PATH": "x"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 1
    assert "no Ray cluster can be used at 127.0.0.1:1" in done.stderr
    assert "Traceback" not in done.stderr
