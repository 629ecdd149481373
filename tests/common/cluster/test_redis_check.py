"""What is said of a Redis at the start: one that answers well, one that does not, and those that forget."""

import asyncio
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import pytest
import redis

from common.cluster import redis_check
from common.cluster.redis_check import RedisAway, RedisClusterUnsupported, RedisFinding, examine, say_redis
from deploy.process.child import start_child
from tests.ports import free_port
from tests.redis_box import RedisBox, binaries, redis_box
from tests.waiting import until


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RedisBox]:
    monkeypatch.setattr(redis_check, "TIMEOUT_S", 60.0)
    with redis_box(binaries()[0], tmp_path) as server:
        yield server


@pytest.fixture
async def cluster_port(tmp_path: Path) -> Iterator[int]:  # type: ignore[misc]
    port = free_port()
    settings = f'bind 127.0.0.1\nport {port}\ncluster-enabled yes\nsave ""\ndir {tmp_path}\n'.encode()
    child = start_child("cluster", [binaries()[0], "-"], tmp_path / "cluster.log", stdin=settings)

    async def answers() -> bool:
        try:
            with redis.Redis(port=port) as client:
                return bool(client.ping())
        except redis.ConnectionError:
            return False

    await until(answers)
    yield port
    child.stop(grace_s=2.0)


def as_user(box: RedisBox, *rules: str) -> str:
    box.client().execute_command("ACL", "SETUSER", "someone", "on", ">word", *rules)
    parts = urlsplit(box.url)
    return urlunsplit(parts._replace(netloc=f"someone:word@127.0.0.1:{box.port}"))


async def test_a_redis_that_is_well_has_a_version_and_no_warning(box: RedisBox) -> None:
    finding = await examine(box.url, "ns")
    assert finding.version[0].isdigit()
    assert finding.warnings == ()
    assert box.client().dbsize() == 0


STATES: list[tuple[Callable[[redis.Redis], object], str]] = [
    (lambda client: client.config_set("maxmemory-policy", "allkeys-lru"), "may evict workers and their prefixes"),
    (lambda client: client.config_set("maxmemory", 1), "it is full"),
    (lambda client: client.replicaof("127.0.0.1", "1"), "it takes no writes"),
    (lambda client: client.config_set("min-replicas-to-write", 2), "it takes no writes"),
]


@pytest.mark.parametrize(("begin", "said"), STATES)
async def test_what_would_make_it_forget_workers_is_said(
    box: RedisBox, begin: Callable[[redis.Redis], object], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(box.client())
    (warning,) = (await examine(box.url, "ns")).warnings
    assert said in warning
    await say_redis(box.url, "ns")
    assert said in capsys.readouterr().out


async def test_a_user_without_the_rights_is_named_and_one_that_may_not_look_is_fine(box: RedisBox) -> None:
    (warning,) = (await examine(as_user(box, "+ping"), "ns")).warnings
    assert "lacks rights that docs/security.md lists" in warning
    assert await examine(as_user(box, "~ns:*", "+ping", "+srem"), "ns") == RedisFinding("")


@pytest.mark.parametrize("rules", [("+info",), ("-info",)])
async def test_a_redis_cluster_is_refused_by_name(cluster_port: int, rules: tuple[str, ...]) -> None:
    """Also where the user may not see that it is one."""
    with redis.Redis(port=cluster_port) as client:
        client.execute_command("ACL", "SETUSER", "default", *rules)
    for call in (examine, say_redis):
        with pytest.raises(RedisClusterUnsupported, match="Redis Cluster, which is not supported"):
            await call(f"redis://127.0.0.1:{cluster_port}/0", "ns")


@pytest.mark.parametrize("is_listening", [True, False])
async def test_one_that_does_not_answer_is_said_to_be_away(
    is_listening: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(redis_check, "TIMEOUT_S", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if is_listening:
            silent.listen()
        url = f"redis://:hunter2@127.0.0.1:{silent.getsockname()[1]}/0"
        with pytest.raises(RedisAway, match="Redis does not answer") as raised:
            await examine(url, "ns")
        async with asyncio.timeout(60.0):
            await say_redis(url, "ns")
    said = capsys.readouterr().out
    assert "redis_away" in said
    assert "hunter2" not in said + str(raised.value)
