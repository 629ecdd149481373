"""One cluster over mutual TLS: it answers as ever, lets nobody in, and listens where the documentation says."""

import asyncio
import contextlib
import json
import os
import pickle
import re
import signal
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest

from common.wire.pb import handoff_pb2, handoff_pb2_grpc, worker_pb2, worker_pb2_grpc
from deploy.process.reaper import SESSION_VARIABLE, session_pids
from tests.certificates import new_certs, trusting
from tests.cluster.cluster import Cluster, running_cluster
from tests.cluster.golden import load_goldens, mismatches_alone, over_http
from tests.cluster.sockets import Listening, listening
from tests.paths import ROOT

GOLDENS = load_goldens()[:4]
DISAGGREGATED = ("--dtype", "float32", "--local-prefill-max-tokens", "0")
DOCS = ROOT / "docs" / "security.md"
SECRET = "admin-key-of-the-test"


@pytest.fixture(scope="module")
def cluster(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = new_certs(tmp_path_factory.mktemp("tls"))
    with trusting(directory), pytest.MonkeyPatch.context() as environment:
        environment.setenv("PDSERVE_ROUTER_ADMIN_KEY", SECRET)
        with running_cluster(demo_model, *DISAGGREGATED, prefill=2, decode=2, tls=directory) as cluster:
            yield cluster


def certificates(cluster: Cluster) -> Path:
    assert cluster.tls is not None
    return cluster.tls


async def test_answers_are_the_references_over_tls(cluster: Cluster) -> None:
    """Over HTTPS through the handoff, and over gRPC by the command for people."""
    assert await mismatches_alone(GOLDENS, over_http, cluster.url) == []
    golden = next(golden for golden in load_goldens() if golden.prompt)
    done = cluster.cli("generate", "--json", "--temperature", "0", "--max-tokens", "8", "--", str(golden.prompt))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["token_ids"] == golden.output_token_ids[:8]


def test_commands_work_over_tls_and_say_whom_they_do_not_trust(cluster: Cluster) -> None:
    assert cluster.cli("audit", "--tls", str(cluster.tls)).returncode == 0
    assert "ready" in cluster.cli("status").stdout
    with pytest.MonkeyPatch.context() as environment:
        for name in ("PDSERVE_TLS_CA_FILE", "SSL_CERT_FILE"):
            environment.delenv(name)
        refused = cluster.cli("status")
    assert (refused.returncode, "is not trusted" in refused.stderr) == (1, True)


def test_in_the_clear_nobody_is_answered(cluster: Cluster) -> None:
    with pytest.raises(httpx.HTTPError):
        httpx.get(cluster.url.replace("https:", "http:") + "/live", timeout=60)
    for worker in cluster.workers():
        with grpc.insecure_channel(worker["address"]) as channel:
            assert _audit(channel) is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("component", ["prefill", "decode", "front"])
def test_a_wrong_role_is_refused_by_every_worker(cluster: Cluster, component: str) -> None:
    for worker in cluster.workers():
        with cluster.identity(component).blocking_channel(worker["address"], worker["role"]) as channel:
            assert _audit(channel) is grpc.StatusCode.PERMISSION_DENIED


def test_nobody_but_a_prefill_worker_opens_a_handoff(cluster: Cluster) -> None:
    address = cluster.workers("decode")[0]["address"]
    for component in ("router", "decode", "operator"):
        with cluster.identity(component).blocking_channel(address, "decode") as channel:
            with pytest.raises(grpc.RpcError) as refused:
                next(handoff_pb2_grpc.HandoffServiceStub(channel).Connect(iter([handoff_pb2.ConnectRequest()])))
            assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED


def _audit(channel: grpc.Channel) -> grpc.StatusCode:
    try:
        worker_pb2_grpc.WorkerServiceStub(channel).Audit(worker_pb2.AuditRequest(), timeout=60)
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return grpc.StatusCode.OK


# ---- ports ----------------------------------------------------------------------------------------------


def documented_ports() -> Counter[str]:
    """How many rows the table of ports has, by process."""
    table = DOCS.read_text().partition("## Ports")[2].partition("\n## ")[0]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("|")]
    return Counter(columns[2].strip() for columns in rows[2:])


def pids_of(cluster: Cluster) -> list[int]:
    """Every process of the session, Ray's included."""
    found = re.search(r"logs are below (\S+) ", cluster.log_path.read_text())
    assert found is not None
    children = [child.pid for child in psutil.Process(cluster.process.pid).children()]
    child = next(pid for pid in children if SESSION_VARIABLE in _environment(pid))
    return [cluster.process.pid, *session_pids(_environment(child)[SESSION_VARIABLE], found[1])]


def process_of(pid: int) -> str:
    """As the table names it."""
    command = _read(pid, "cmdline").replace(b"\0", b" ").decode()
    for name, pattern in (
        ("router", r"deploy\.cli router"),
        ("redis", "redis-server|valkey"),
        ("worker", "WorkerActor"),
    ):
        if re.search(pattern, command):
            return name
    return "ray"


def test_every_socket_that_listens_is_documented_and_on_loopback(cluster: Cluster) -> None:
    """M-01: asked of the kernel, not of the configuration."""
    found = listening(pids_of(cluster))
    assert [each for each in found if not each.is_loopback] == []
    assert [each for each in found if each.protocol.startswith("udp")] == []
    by_process: dict[str, set[Listening]] = {}
    for each in found:
        by_process.setdefault(process_of(each.pid), set()).add(each)
    assert by_process.keys() <= documented_ports().keys(), by_process
    assert {each.port for each in by_process["router"]} == {cluster.http_port, cluster.grpc_port}
    assert len(by_process["redis"]) == 1
    workers = {worker["pid"]: int(worker["address"].rpartition(":")[2]) for worker in cluster.workers()}
    for pid, port in workers.items():
        assert port in {each.port for each in by_process["worker"] if each.pid == pid}


def test_a_socket_on_every_interface_would_be_seen() -> None:
    with socket.create_server(("0.0.0.0", 0)) as server:
        mine = [found for found in listening([os.getpid()]) if found.port == server.getsockname()[1]]
    assert [(found.host, found.is_loopback) for found in mine] == [("0.0.0.0", False)]
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        mine = [found for found in listening([os.getpid()]) if found.port == server.getsockname()[1]]
    assert [(found.host, found.is_loopback) for found in mine] == [("::1", True)]


def _read(pid: int, name: str) -> bytes:
    """Of /proc; empty when the process has ended."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def _environment(pid: int) -> dict[str, str]:
    pairs = _read(pid, "environ").decode(errors="replace").split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


class _Planted:
    """What unpickling it would do: make a file."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self._marker}",)


def _takes_newcomers(host: str, port: int) -> bool:
    """The port of a link that stands drops what knocks: nothing that is sent there is read."""
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError:
        return False
    return True


async def test_no_port_unpickles_what_it_is_sent(cluster: Cluster, tmp_path: Path) -> None:
    """Q-01: to every listening socket, bare and with a length before it; everything goes on."""
    payload = pickle.dumps(_Planted(tmp_path / "marker"))
    workers = {worker["pid"] for worker in cluster.workers()}
    messages = (payload, struct.pack("!I", len(payload)) + payload, struct.pack("<Q", len(payload)) + payload)
    for found in set(listening(pids_of(cluster))):
        for message in messages if _takes_newcomers(found.host, found.port) else ():
            with contextlib.suppress(OSError), socket.create_connection((found.host, found.port), timeout=60) as peer:
                peer.sendall(message)
                peer.shutdown(socket.SHUT_WR)
                peer.settimeout(0.1)
                peer.recv(1024)
    assert await mismatches_alone(GOLDENS, over_http, cluster.url) == []
    assert not (tmp_path / "marker").exists()
    assert {worker["pid"] for worker in cluster.workers()} == workers


# ---- secrets --------------------------------------------------------------------------------------------


def test_no_secret_is_in_a_command_line_a_log_or_an_answer(cluster: Cluster) -> None:
    """Q-06: the admin key, the password of Redis, the token of Ray and the keys of the certificates."""
    runtime_dir = Path(re.search(r"logs are below (\S+) ", cluster.log_path.read_text())[1])  # type: ignore[index]
    router = json.loads((runtime_dir / "router.json").read_text())
    secrets = {
        SECRET,
        router["redis_url"].partition("://:")[2].partition("@")[0],
        (runtime_dir / "ray_token").read_text(),
    }
    secrets |= {path.read_text().splitlines()[1] for path in certificates(cluster).glob("*.key")}
    assert all(len(secret) > 15 for secret in secrets)
    pids = pids_of(cluster)
    texts = {f"cmdline of {pid}": _read(pid, "cmdline") for pid in pids}
    texts |= {f"environment of {pid}": _read(pid, "environ") for pid in pids if pid != pids[0]}
    logs = [
        cluster.log_path,
        *runtime_dir.glob("*.log"),
        *runtime_dir.glob("ray/**/*.log"),
        *runtime_dir.glob("ray/**/*.out"),
    ]
    texts |= {str(path): path.read_bytes() for path in logs if path.is_file()}
    for path in ("/metrics", "/version", "/v1/models", "/no/such/path", "/admin/v1/state"):
        texts[path] = httpx.get(f"{cluster.url}{path}", headers={"x-admin-key": SECRET}, timeout=60).content
    texts["config show"] = cluster.cli("config", "show").stdout.encode()
    found = [(name, secret[:4]) for name, text in texts.items() for secret in secrets if secret.encode() in text]
    assert found == []


# ---- under load -----------------------------------------------------------------------------------------


class Load:
    """Requests one after another, each on a new connection and compared with the reference."""

    def __init__(self, cluster: Cluster) -> None:
        self.faults: list[str] = []
        self.num_rounds = 0
        self._cluster = cluster
        self._stop = asyncio.Event()

    async def __aenter__(self) -> "Load":
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop.set()
        await self._task

    async def _run(self) -> None:
        while not self._stop.is_set():
            self.faults += await mismatches_alone(GOLDENS[:2], over_http, self._cluster.url)
            self.num_rounds += 1

    async def rounds(self, count: int) -> None:
        """Return after so many more; raises what a request raised."""
        target = self.num_rounds + count
        while self.num_rounds < target:
            if self._task.done():
                self._task.result()
            await asyncio.sleep(0.05)


async def test_replacing_certificates_under_load_fails_no_request(cluster: Cluster) -> None:
    """1. Twice, all certificates are replaced while requests come.
    2. A prefill worker is replaced, too: its successor and the others meet with the new ones.
    3. Every answer was the reference's.
    """
    before = (certificates(cluster) / "router.crt").read_bytes()
    async with Load(cluster) as load:
        for _ in range(2):
            await asyncio.to_thread(new_certs, certificates(cluster))
            await load.rounds(2)
        worker = cluster.workers("prefill")[0]["worker_id"]
        drained = await asyncio.to_thread(cluster.cli, "drain", worker, "--grace", "30")
        assert drained.returncode == 0, drained.stderr
        await asyncio.to_thread(cluster.wait_for_pools, 2, 2)
        await load.rounds(3)
    assert (certificates(cluster) / "router.crt").read_bytes() != before
    assert load.faults == []


async def test_a_decode_worker_that_gloo_ends_is_replaced_and_its_requests_are_replayed(cluster: Cluster) -> None:
    """A KV message longer than the room behind its receive ends the process by SIGABRT; here the signal comes alone."""

    def busy(state: Any) -> list[dict[str, Any]]:
        return [worker for worker in state["workers"] if worker["role"] == "decode" and worker["running"]]

    async with Load(cluster) as load:
        (worker, *_) = await asyncio.to_thread(cluster.wait_for, busy, bool)
        os.kill(worker["pid"], signal.SIGABRT)
        await load.rounds(1)
        await asyncio.to_thread(cluster.wait_for_pools, 2, 2)
        await load.rounds(2)
    assert worker["pid"] not in [other["pid"] for other in cluster.workers()]
    assert load.faults == []
