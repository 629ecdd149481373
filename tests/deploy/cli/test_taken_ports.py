"""A port that is taken is said in one sentence, whichever it is; nothing keeps running."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ports import free_port
from tests.redis_box import RedisBox, binaries, redis_box
from tests.tiny_model import write_tiny_model

LIMIT_S = 120.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisBox]:
    with redis_box(binaries()[0], tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def taken() -> Iterator[int]:
    """A port of loopback that somebody else listens on; the one before it is free."""
    port = free_port(1) + 1
    with socket.create_server(("127.0.0.1", port)):
        yield port


def run(*arguments: str, **settings: object) -> "subprocess.CompletedProcess[str]":
    env = {**os.environ, **{name: str(value) for name, value in settings.items()}}
    command = [sys.executable, "-m", "deploy.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=LIMIT_S, check=False)


@pytest.mark.parametrize("name", ["HTTP_PORT", "GRPC_PORT", "METRICS_PORT"])
def test_up_names_the_port_of_its_routers_before_it_starts_anything(model: Path, taken: int, name: str) -> None:
    """The second of two routers would have it."""
    settings = {"PDSERVE_ROUTER_HTTP_PORT": 0, "PDSERVE_ROUTER_GRPC_PORT": 0, f"PDSERVE_ROUTER_{name}": taken - 1}
    result = run("up", "--model", str(model), "--routers", "2", **settings)
    assert result.returncode == 1
    assert f"port {taken} on 127.0.0.1 cannot be used (Address already in use)" in result.stderr
    assert "Traceback" not in result.stderr
    assert "ray" not in result.stderr


@pytest.mark.parametrize("name", ["HTTP_PORT", "GRPC_PORT", "METRICS_PORT"])
def test_a_router_names_its_port(model: Path, box: RedisBox, taken: int, name: str) -> None:
    settings = {"PDSERVE_ROUTER_HTTP_PORT": 0, "PDSERVE_ROUTER_GRPC_PORT": 0, f"PDSERVE_ROUTER_{name}": taken}
    result = run("router", "--model", str(model), "--redis-url", box.url, **settings)
    assert result.returncode == 1
    sentence = next(line for line in result.stderr.splitlines() if line.startswith("pdserve: "))
    assert f"127.0.0.1:{taken}" in sentence
    assert name.lower() in sentence.replace("-", "_")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("name", ["PORT", "METRICS_PORT"])
def test_a_worker_names_its_port(model: Path, box: RedisBox, taken: int, name: str) -> None:
    settings = {f"PDSERVE_DECODE_WORKER_{name}": taken, "PDSERVE_DECODE_WORKER_NUM_THREADS": 1}
    worker = ("worker", "--role", "decode", "--worker-id", "decode-0", "--model", str(model), "--redis-url", box.url)
    result = run(*worker, **settings)
    assert result.returncode == 1
    assert any(
        line.startswith("pdserve: cannot") and f"127.0.0.1:{taken}" in line for line in result.stderr.splitlines()
    )
    assert "Traceback" not in result.stderr
