"""Connections to Redis that fail fast: short timeouts, no retries, nothing decoded or unpickled.

All that a connection needs is in the URL, `rediss://USER@HOST:6380/0?ssl_ca_certs=FILE&password_file=FILE`: TLS with
the CA that signed the server (the machine's CAs when none is named), and a mounted file with the password, which is
read for each new connection, so that it may be replaced.
"""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qs, unquote, urlencode, urlsplit, urlunsplit

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.client import Pipeline
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import AuthenticationError, RedisError

from common.values.errors import PdserveError

# What a call may raise when Redis is away, slow or refuses: an event for us, never a bug.
REDIS_ERRORS = (RedisError, OSError, TimeoutError)

ResultT = TypeVar("ResultT")


class InvalidRedisUrl(PdserveError):
    """Not repeated: it may hold a password."""

    def __init__(self) -> None:
        super().__init__("the Redis URL (--redis-url) is none: expected redis://HOST:PORT/0, rediss:// or unix://PATH")


def connect(redis_url: str, timeout_s: float, max_connections: int = 8) -> Redis:
    """A client that connects on first use. The default client retries for seconds; this one never does.

    Raises InvalidRedisUrl.
    """
    try:
        url, credentials = split_credentials(redis_url)
        pool = BlockingConnectionPool.from_url(
            url,
            **({} if credentials is None else {"credential_provider": credentials}),
            max_connections=max_connections,
            timeout=timeout_s,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
    except ValueError as error:
        raise InvalidRedisUrl from error
    return _Redis(connection_pool=pool)


async def to_its_end(call: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Await a call of redis-py. A cancellation ends it and always reaches the caller.

    Inside, Python 3.11's `asyncio.wait_for` may take an answer that comes in the same moment for the end and swallow
    the cancellation: a caller that cancelled a loop, and waits for its end, would then wait for ever.
    """
    task = asyncio.ensure_future(call)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not log it
        raise


class _Redis(Redis):
    """Every command goes through `to_its_end`: scripts are commands, transactions have a class of their own."""

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        return await to_its_end(super().execute_command(*args, **options))  # type: ignore[no-untyped-call]

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> Pipeline:
        return _Pipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)


class _Pipeline(Pipeline):
    async def execute(self, raise_on_error: bool = True) -> Any:
        return await to_its_end(super().execute(raise_on_error))


class PasswordFile(CredentialProvider):
    """User and password of new connections; the password is what the file holds then, without the line's end."""

    def __init__(self, user: str, path: str) -> None:
        self._user = user
        self._path = path

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        try:
            password = Path(self._path).read_text().rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            raise AuthenticationError(f"password_file {self._path}: {type(error).__name__}") from error
        return (self._user, password) if self._user else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        return self.get_credentials()


def split_credentials(redis_url: str) -> tuple[str, PasswordFile | None]:
    """The URL as redis-py takes it, and where the password is if the URL only says so."""
    parts = urlsplit(redis_url)
    query = parse_qs(parts.query, keep_blank_values=True)
    paths = query.pop("password_file", [])
    if not paths:
        return redis_url, None
    user = unquote(parts.username or "")
    netloc = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=netloc, query=urlencode(query, doseq=True))), PasswordFile(user, paths[-1])


async def wait_for_event(event: asyncio.Event, limit_s: float) -> None:
    """Return when the event is set, or after `limit_s`."""
    try:
        async with asyncio.timeout(limit_s):
            await event.wait()
    except TimeoutError:
        pass
