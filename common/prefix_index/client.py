"""Connections to Redis that fail fast: short timeouts, no retries, nothing decoded or unpickled."""

import asyncio

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

# What a call may raise when Redis is away, slow or refuses: an event for us, never a bug.
REDIS_ERRORS = (RedisError, OSError, TimeoutError)


def connect(redis_url: str, timeout_s: float, max_connections: int = 8) -> Redis:
    """A client that connects on first use. The default client retries for seconds; this one never does."""
    pool = BlockingConnectionPool.from_url(
        redis_url,
        max_connections=max_connections,
        timeout=timeout_s,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(NoBackoff(), 0),
        protocol=2,
    )
    return Redis(connection_pool=pool)


async def wait_for_event(event: asyncio.Event, limit_s: float) -> None:
    """Return when the event is set, or after `limit_s`."""
    try:
        async with asyncio.timeout(limit_s):
            await event.wait()
    except TimeoutError:
        pass
