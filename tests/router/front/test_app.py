"""The router as a process: ports, readiness, drain. Its Redis is away throughout, so no worker is ever found."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.values.config import ModelConfig, RouterConfig
from router.app import RouterPorts, serve, serve_until
from router.core.generation import GenerationRequest
from router.front.frontend import Frontend
from router.front.grpc.server import SERVICE_NAME
from router.front.http.admin import AdminHooks
from router.front.http.listening import HttpServer
from router.front.http.server import build_app
from router.front.in_flight import InFlight
from router.front.ports import PortInUse, bind
from tests.router.front.http_rig import SETTINGS, build_frontend, ids, in_flight, open_access
from tests.router.front.scripted_service import Pause, Script, ScriptedService, accepted, tokens
from tests.tiny_model import write_tiny_model
from tests.waiting import until

NO_REDIS = "redis://127.0.0.1:1/0"


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def config_of(model_path: Path, **ports: int) -> RouterConfig:
    defaults = {"http_port": 0, "grpc_port": 0}
    return RouterConfig(model=ModelConfig(path=str(model_path)), redis_url=NO_REDIS, **{**defaults, **ports})


def http_server(frontend: Frontend) -> HttpServer:
    app = build_app(frontend, SETTINGS, AdminHooks(lambda: b"", "0"), open_access())
    return HttpServer(app, bind("127.0.0.1", 0, "--http-port"))


async def test_the_router_serves_until_it_is_told_to_stop(model_path: Path) -> None:
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    serving = asyncio.ensure_future(serve(config_of(model_path), on_ready=ready.set_result, stop=stop))
    ports: RouterPorts = await asyncio.wait_for(ready, 60)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{ports.http}", timeout=60) as client:
        live = await client.get("/live")
        unready = await client.get("/ready")
        [card] = (await client.get("/v1/models")).json()["data"]
        metrics = (await client.get("/metrics")).text
    async with grpc.aio.insecure_channel(f"127.0.0.1:{ports.grpc}") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        status = (await health.Check(health_pb2.HealthCheckRequest(service=SERVICE_NAME))).status
    stop.set()
    await asyncio.wait_for(serving, 60)
    assert live.status_code == 200
    assert unready.status_code == 503 and "no decode worker is ready" in unready.json()["reasons"]
    assert (card["id"], card["max_model_len"]) == ("tiny", 2048)
    assert "pdserve_build_info{" in metrics
    assert status == health_pb2.HealthCheckResponse.NOT_SERVING
    bind("127.0.0.1", ports.http, "--http-port").close()


@pytest.mark.parametrize("port", ["http_port", "grpc_port"])
async def test_a_port_in_use_is_named_with_its_flag(model_path: Path, port: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(PortInUse, match=f"--{port.replace('_', '-')}"):
            await serve(config_of(model_path, **{port: taken.getsockname()[1]}), stop=asyncio.Event())


def test_two_listeners_never_share_a_port() -> None:
    first = bind("127.0.0.1", 0, "--http-port")
    with pytest.raises(PortInUse, match="choose another port"):
        bind("127.0.0.1", first.getsockname()[1], "--http-port")
    first.close()


def test_sigterm_ends_the_process_in_order(model_path: Path) -> None:
    script = (
        "import sys, json\n"
        "from common.values.config import RouterConfig\n"
        "from common.telemetry.logs import configure_logs\n"
        "from router.app import run\n"
        "configure_logs('router')\n"
        "config = RouterConfig.model_validate_json(sys.argv[1])\n"
        "run(config, on_ready=lambda ports: print(json.dumps([ports.http, ports.grpc]), flush=True))\n"
    )
    command = [sys.executable, "-c", script, config_of(model_path).model_dump_json()]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as process:
        assert process.stdout is not None
        http_port, _ = json.loads(process.stdout.readline())
        assert httpx.get(f"http://127.0.0.1:{http_port}/live", timeout=60).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


async def test_a_drain_refuses_new_requests_and_ends_old_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. one stream ends within the grace, one does not; 2. meanwhile new requests and probes get 503; 3. the late
    stream gets an error event."""

    def script(request: GenerationRequest) -> Script:
        return [accepted(request), *tokens([ids("ab")], None), Pause()]

    async def is_closed() -> bool:
        return frontend.in_flight.is_closed

    looked = asyncio.Event()

    async def drain(grace_s: float) -> None:
        await looked.wait()
        await InFlight.drain(frontend.in_flight, grace_s)

    frontend = build_frontend(ScriptedService(script))
    monkeypatch.setattr(frontend.in_flight, "drain", drain)
    server = HttpServer(
        build_app(frontend, SETTINGS, AdminHooks(lambda: b"", "0"), open_access()), bind("127.0.0.1", 0, "--http-port")
    )
    stop = asyncio.Event()
    running = asyncio.ensure_future(serve_until(stop, asyncio.sleep(3600), frontend, server, 0.5))
    body = {"prompt": "x", "stream": True}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=60) as client:
        old = asyncio.ensure_future(client.post("/v1/completions", json=body))
        await in_flight(frontend, 1)
        stop.set()
        await until(is_closed)
        refused = await client.post("/v1/completions", json=body)
        unready = await client.get("/ready")
        looked.set()
        late = await old
    await asyncio.wait_for(running, 60)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_ready_pair")
    assert refused.headers["retry-after"] == "1"
    assert unready.json()["reasons"] == ["the router is shutting down"]
    assert "shutting down" in late.text and "[DONE]" not in late.text


async def test_a_broken_service_ends_the_router_with_its_error() -> None:
    async def broken() -> None:
        raise RuntimeError("the core broke")

    frontend = build_frontend(ScriptedService(lambda _: []))
    server = HttpServer(
        build_app(frontend, SETTINGS, AdminHooks(lambda: b"", "0"), open_access()), bind("127.0.0.1", 0, "--http-port")
    )
    with pytest.raises(RuntimeError, match="the core broke"):
        await serve_until(asyncio.Event(), broken(), frontend, server, 5.0)
