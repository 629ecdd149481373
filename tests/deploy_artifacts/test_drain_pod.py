"""The preStop hook of worker pods, against a router that is played by a small HTTP server."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.deploy_artifacts.toolbox import CHART, RAY

SCRIPT = CHART / "files" / "drain_pod.py"
Hook = Callable[..., "subprocess.CompletedProcess[str]"]


class Router:
    """What the hook sees of a router: workers that leave some looks after they were drained."""

    def __init__(self, workers: list[dict[str, str]], looks_until_gone: int) -> None:
        self.drains: list[tuple[str, Any]] = []
        self.keys: set[str | None] = set()
        self.num_looks = 0
        self._workers = workers
        self.looks_left = looks_until_gone
        self.successor: dict[str, str] | None = None
        router = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                router.keys.add(self.headers["x-admin-key"])
                assert self.path == "/admin/v1/state"
                router.num_looks += 1
                self._reply({"workers": router.look()})

            def do_POST(self) -> None:
                router.keys.add(self.headers["x-admin-key"])
                length = int(self.headers["content-length"])
                router.drains.append((self.path, json.loads(self.rfile.read(length))))
                self._reply({})

            def _reply(self, body: object) -> None:
                data = json.dumps(body).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *arguments: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def look(self) -> list[dict[str, str]]:
        if self.drains:
            self.looks_left -= 1
        if self.looks_left > 0:
            return self._workers
        return [self.successor] if self.successor else []


@pytest.fixture
def router() -> Iterator[Router]:
    workers = [
        {"worker_id": "decode-0", "address": "10.0.0.7:50061"},
        {"worker_id": "prefill 1", "address": "10.0.0.9:50061"},
    ]
    router = Router(workers, looks_until_gone=2)
    thread = threading.Thread(target=router.server.serve_forever, daemon=True)
    thread.start()
    yield router
    router.server.shutdown()
    router.server.server_close()


@pytest.fixture
def hook(tmp_path: Path) -> Hook:
    """Run the hook with a `ray` that only writes down how it was called."""
    ray = tmp_path / "ray"
    ray.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/ray.log\n')
    ray.chmod(0o755)

    def run(url: str, pod_ip: str, seconds: str = "35") -> "subprocess.CompletedProcess[str]":
        env = {**os.environ, "PDSERVE_URL": url, "POD_IP": pod_ip, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        command = [sys.executable, str(SCRIPT), seconds]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)

    return run


def url_of(router: Router) -> str:
    return f"http://127.0.0.1:{router.server.server_port}"


def test_the_worker_of_this_pod_is_drained_and_waited_for(router: Router, hook: Hook) -> None:
    """Its id is quoted; it is gone at the second look after the request, and only then the hook ends."""
    done = hook(url_of(router), "10.0.0.9")
    assert done.returncode == 0, done.stderr
    assert router.drains == [("/admin/v1/workers/prefill%201/drain", {"grace_s": 20.0})]
    assert router.num_looks == 3


@pytest.mark.parametrize("key", ["s3cret", None])
def test_routers_that_ask_for_a_key_get_it(
    router: Router, hook: Hook, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, key: str | None
) -> None:
    if key is not None:
        (tmp_path / "admin-key").write_text(f"{key}\n")
        monkeypatch.setenv("PDSERVE_ROUTER_ADMIN_KEY_FILE", str(tmp_path / "admin-key"))
    assert hook(url_of(router), "10.0.0.9").returncode == 0
    assert (len(router.drains), router.keys) == (1, {key})


def test_ray_places_nothing_on_the_node_from_then_on(router: Router, hook: Hook, tmp_path: Path) -> None:
    hook(url_of(router), "10.0.0.1")
    call = (tmp_path / "ray.log").read_text()
    assert call.startswith("drain-node --reason DRAIN_NODE_REASON_PREEMPTION")
    assert "--deadline-remaining-seconds 35" in call


def test_a_pod_without_a_worker_ends_at_once(router: Router, hook: Hook) -> None:
    done = hook(url_of(router), "10.0.0.1")
    assert (done.returncode, router.drains, router.num_looks) == (0, [], 1)


def test_another_worker_at_the_same_address_is_not_waited_for(router: Router, hook: Hook) -> None:
    """Pod addresses are used again."""
    router.successor = {"worker_id": "decode-9", "address": "10.0.0.7:50061"}
    assert hook(url_of(router), "10.0.0.7").returncode == 0
    assert router.num_looks == 3


def test_a_worker_that_does_not_leave_is_waited_for_until_the_limit(router: Router, hook: Hook) -> None:
    router.looks_left = 1_000_000
    assert hook(url_of(router), "10.0.0.7", seconds="16").returncode == 0
    assert router.num_looks >= 2


def test_a_router_that_is_away_does_not_keep_the_pod(router: Router, hook: Hook) -> None:
    router.server.server_close()
    done = hook(url_of(router), "10.0.0.7")
    assert done.returncode == 0
    assert "drain_pod: " in done.stderr


def test_the_hook_calls_ray_as_this_ray_understands_it() -> None:
    """The command is hidden in Ray's help: this fails when an upgrade takes it away."""
    helped = subprocess.run([RAY, "drain-node", "--help"], capture_output=True, text=True, timeout=60, check=False)
    assert helped.returncode == 0
    for word in ("--reason", "--reason-message", "--deadline-remaining-seconds", "DRAIN_NODE_REASON_PREEMPTION"):
        assert word in helped.stdout
    assert "Will default to current node" in " ".join(helped.stdout.split())
