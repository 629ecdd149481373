"""How a connection to Redis is made: TLS, a password in a file, users that may do what they need and no more."""

import asyncio
import re
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.exceptions import AuthenticationError, NoPermissionError

from common.cluster.leased_reports import LeasedReports
from common.cluster.pools import PoolStore
from common.cluster.prefix_index.mirror import PrefixIndexMirror
from common.cluster.presence import WorkerPresence
from common.cluster.redis import REDIS_ERRORS, connect, to_its_end
from common.cluster.registry import RedisRegistry
from common.values.messages import Role
from deploy.local.redis_server import NAMES_ON_PATH, find_binary
from deploy.process.child import start_child
from tests.certificates import new_certs
from tests.common.cluster.prefix_index.conftest import chain, registration
from tests.paths import ROOT
from tests.ports import free_port
from tests.redis_box import RedisBox
from tests.waiting import until

DOCS = ROOT / "docs" / "security.md"
NAMESPACE = "acl"


async def reply(client: Redis, *command: str) -> object:
    try:
        return await client.execute_command(*command)
    finally:
        await client.aclose()


def url_of(box: RedisBox, user: str, query: str) -> str:
    return f"redis://{user}127.0.0.1:{box.port}/0{query}"


def password_of(box: RedisBox) -> str:
    return box.url.partition("://:")[2].partition("@")[0]


async def test_the_password_is_read_for_each_connection(box: RedisBox, tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_text("wrong\n")
    url = url_of(box, "", f"?password_file={path}")
    with pytest.raises(AuthenticationError):
        await reply(connect(url, 5.0), "PING")
    path.write_text(password_of(box) + "\n")
    assert await reply(connect(url, 5.0), "PING")


async def test_a_missing_password_file_is_as_a_redis_that_is_away(box: RedisBox, tmp_path: Path) -> None:
    with pytest.raises(REDIS_ERRORS, match="FileNotFoundError"):
        await reply(connect(url_of(box, "", f"?password_file={tmp_path}/none"), 5.0), "PING")


# ---- TLS ------------------------------------------------------------------------------------------------


def has_tls(binary: str) -> bool:
    return "libssl" in subprocess.run(["ldd", binary], capture_output=True, text=True, check=False).stdout


@pytest.fixture(scope="module")
def tls_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    """A Redis that answers over TLS only; its port and the directory of the CA."""
    binary = find_binary()
    if binary is None or not has_tls(binary):
        pytest.skip(f"no {' or '.join(NAMES_ON_PATH)} with TLS here")
    directory = new_certs(tmp_path_factory.mktemp("redis-tls"))
    port = free_port()
    lines = ["bind 127.0.0.1", "port 0", f"tls-port {port}", 'save ""', "requirepass secret", "tls-auth-clients no"]
    lines += [f"tls-cert-file {directory}/front.crt", f"tls-key-file {directory}/front.key"]
    lines += [f"tls-ca-cert-file {directory}/ca.crt"]
    child = start_child("redis", [binary, "-"], directory / "log", stdin="\n".join([*lines, ""]).encode())
    yield port, directory
    child.stop(5.0)


async def test_the_index_works_over_tls_with_a_password_file(tls_server: tuple[int, Path], tmp_path: Path) -> None:
    port, directory = tls_server
    path = tmp_path / "password"
    path.write_text("secret")
    url = f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={directory}/ca.crt&password_file={path}"
    presence = WorkerPresence(url, "tls", registration("w"), lease_s=30.0, snapshot=lambda: [])
    registry = RedisRegistry(url, "tls")

    async def is_listed() -> bool:
        return await registry.live_workers() == [registration("w")]

    await presence.start()
    await until(is_listed)
    await presence.close()
    await registry.close()


async def test_a_redis_with_an_unknown_certificate_is_not_told_the_password(tls_server: tuple[int, Path]) -> None:
    port, _ = tls_server
    with pytest.raises(REDIS_ERRORS, match="certificate verify failed"):
        await reply(connect(f"rediss://:secret@127.0.0.1:{port}/0", 5.0), "PING")


# ---- users ----------------------------------------------------------------------------------------------


def documented_users() -> dict[str, str]:
    """Rules by user, as the documentation shows them, for our namespace."""
    found = re.findall(r"^ACL SETUSER pdserve-(\w+) (.*)$", DOCS.read_text(), re.M)
    return {name: rules.replace("pdserve:", f"{NAMESPACE}:") for name, rules in found}


async def as_user(box: RedisBox, name: str) -> str:
    """Make the documented user; the URL that it connects with."""
    rules = documented_users()[name].replace(">PASSWORD", ">acl").split()
    await reply(Redis.from_url(box.url), "ACL", "SETUSER", name, *rules)
    return url_of(box, f"{name}:acl@", "")


async def test_the_documented_users_can_do_what_their_process_does(box: RedisBox) -> None:
    """1. A worker registers and publishes. 2. A router finds it. 3. The controller sets sizes and the router changes
    them. 4. Reports. Redis has noted no refusal of ours."""
    worker, router, controller = [await as_user(box, name) for name in ("worker", "router", "controller")]
    await reply(Redis.from_url(box.url), "ACL", "LOG", "RESET")
    hashes = chain("acl", 3)
    presence = WorkerPresence(
        worker, NAMESPACE, registration("w", role=Role.DECODE), lease_s=30.0, snapshot=lambda: hashes
    )
    registry = RedisRegistry(router, NAMESPACE)
    reader = PrefixIndexMirror(router, NAMESPACE)
    reader.start()
    sizes, resizer = PoolStore(controller, NAMESPACE), PoolStore(router, NAMESPACE)
    await presence.start()

    assert [found.ref for found in await registry.live_workers() or []] == [registration("w").ref]

    async def is_mirrored() -> bool:
        await reader.longest_prefix(hashes, [registration("w").ref])
        return reader.known_prefix(hashes, [registration("w").ref]) == {registration("w").ref: 3}

    await until(is_mirrored)
    presence.publish([], hashes[2:])

    async def is_evicted() -> bool:
        return reader.known_prefix(hashes, [registration("w").ref]) == {registration("w").ref: 2}

    await until(is_evicted)
    assert await sizes.announce({"prefill": 1, "decode": 1}, {"a": 1}) == {"prefill": 1, "decode": 1}
    assert await sizes.keep({"prefill": 1, "decode": 1}, {"prefill": 2, "decode": 1})
    assert await sizes.get_kept({"prefill": 1, "decode": 1}) == {"prefill": 2, "decode": 1}
    await resizer.set_desired({"decode": 3})
    assert await sizes.get_desired() == {"prefill": 1, "decode": 3}
    assert await resizer.get_status() == {"a": 1}
    for kind, url in (("router", router), ("loading", worker)):
        reports = LeasedReports(url, NAMESPACE, kind, 5.0)
        assert await reports.announce("r", {"a": 1})
        await reports.withdraw("r")
        await reports.aclose()
    loading = LeasedReports(router, NAMESPACE, "loading", 5.0)
    assert await loading.live() == {}
    watched = LeasedReports(controller, NAMESPACE, "loading", 5.0)
    assert await watched.live() == {}
    await sizes.withdraw()
    await presence.close()
    for owner in (registry, reader, sizes, resizer):
        await owner.close()
    for looker in (loading, watched):
        await looker.aclose()
    refused = await reply(Redis.from_url(box.url), "ACL", "LOG")
    assert isinstance(refused, list)
    # redis-py tells every server its own name, and lives with a no.
    assert [entry for entry in refused if b"client|setinfo" not in entry.values()] == []


FORBIDDEN = [
    ("EVAL", "return 1", "0"),
    ("KEYS", "*"),
    ("FLUSHALL",),
    ("CONFIG", "GET", "*"),
    ("SCRIPT", "FLUSH"),
    ("ACL", "LIST"),
    ("MODULE", "LIST"),
    ("GET", "other:secret"),
    ("SET", "other:secret", "1"),
    ("MONITOR",),
]


@pytest.mark.parametrize("user", ["router", "worker", "controller"])
async def test_the_documented_users_can_do_nothing_else(box: RedisBox, user: str) -> None:
    url = await as_user(box, user)
    for command in FORBIDDEN:
        with pytest.raises(NoPermissionError):
            await reply(connect(url, 5.0), *command)


# ---- cancellation ---------------------------------------------------------------------------------------


class Swallowing:
    """A call that is answered in the moment in which it is cancelled, as `asyncio.wait_for` can make of it."""

    def __init__(self) -> None:
        self.began = asyncio.Event()

    async def __call__(self, *_: object, **__: object) -> int:
        self.began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return 1
        raise AssertionError("never set")


async def test_a_call_that_swallows_its_cancellation_does_not_keep_a_loop_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For a command, a script and a transaction, each inside the usual time limit."""
    client = connect("redis://127.0.0.1:1", 5.0)
    script = client.register_script("return 1")
    calls = {
        "command": lambda: client.get("a"),
        "script": lambda: script(keys=[], args=[]),
        "transaction": lambda: client.pipeline(transaction=True).set("a", "b").execute(),
    }
    for name, call in calls.items():
        swallowing = Swallowing()
        monkeypatch.setattr(Redis, "execute_command", swallowing)
        monkeypatch.setattr(Pipeline, "execute", swallowing)

        async def loop(call: Callable[[], Awaitable[object]] = call) -> None:
            while True:
                async with asyncio.timeout(60.0):
                    await call()

        task = asyncio.create_task(loop(), name=name)
        await swallowing.began.wait()
        task.cancel()
        await asyncio.wait({task}, timeout=60.0)
        assert task.cancelled(), name


async def test_a_call_that_is_cut_off_by_its_time_limit_is_over() -> None:
    swallowing = Swallowing()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await to_its_end(swallowing())
    with pytest.raises(ValueError, match="as it was"):
        await to_its_end(_failing())


async def _failing() -> None:
    raise ValueError("as it was")
