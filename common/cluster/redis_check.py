"""What a Redis is, asked once at the start: whether it answers, and what of it would make pdserve worse.

Redis is a hint, so all but a Redis Cluster is used as it is: what is wrong with it is said, where people look.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ClusterDownError, MovedError, NoPermissionError, RedisError

from common.cluster.keys import Keys
from common.cluster.redis import REDIS_ERRORS, connect
from common.telemetry.logs import get_logger
from common.values.errors import PdserveError

TIMEOUT_S = 2.0


class RedisAway(PdserveError):
    """It cannot be asked; the message says why."""


class RedisClusterUnsupported(PdserveError):
    """Refused at the start: scripts over keys of several slots would fail one by one."""

    def __init__(self) -> None:
        super().__init__(
            "this Redis is a Redis Cluster, which is not supported: name one server (or a primary with replicas), "
            "with cluster-enabled no"
        )


@dataclass(frozen=True, slots=True)
class RedisFinding:
    """`version` is empty where this user may not see it. `warnings`: why workers or prefixes may be forgotten."""

    version: str
    warnings: tuple[str, ...] = ()


async def examine(redis_url: str, namespace: str) -> RedisFinding:
    """One round trip and a look. Raises RedisAway and RedisClusterUnsupported."""
    client = connect(redis_url, TIMEOUT_S, max_connections=1)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await client.ping()
            info = await _info(client)
            if info.get("cluster_enabled"):
                raise RedisClusterUnsupported
            return RedisFinding(
                str(info.get("redis_version", "")), (*await _refusal(client, namespace), *_memory(info))
            )
    except (MovedError, ClusterDownError) as error:
        raise RedisClusterUnsupported from error
    except (*REDIS_ERRORS, ValueError) as error:
        raise RedisAway(f"Redis does not answer: {_text(error)}") from error
    finally:
        await client.aclose()


async def say_redis(redis_url: str, namespace: str) -> None:
    """Log what is wrong with it. Raises RedisClusterUnsupported."""
    try:
        for warning in (await examine(redis_url, namespace)).warnings:
            get_logger().warning("redis_warning", reason=warning)
    except RedisAway as error:
        get_logger().warning("redis_away", reason=str(error))


async def _info(client: Redis) -> Mapping[str, Any]:
    try:
        return dict(await client.info())
    except NoPermissionError:
        return {}


async def _refusal(client: Redis, namespace: str) -> tuple[str, ...]:
    """Why it takes no writes; asked with one that changes nothing."""
    try:
        await client.srem(Keys(namespace).workers, "")
    except (MovedError, ClusterDownError):
        raise
    except NoPermissionError as error:
        return (f"its user lacks rights that docs/security.md lists: {_text(error)}",)
    except RedisError as error:
        return (f"it takes no writes, so workers are not found: {_text(error)}",)
    return ()


def _memory(info: Mapping[str, Any]) -> tuple[str, ...]:
    policy, most, used = (
        info.get("maxmemory_policy", "noeviction"),
        info.get("maxmemory", 0),
        info.get("used_memory", 0),
    )
    if policy != "noeviction":
        return (f"it may evict workers and their prefixes (maxmemory-policy {policy}): set noeviction",)
    if most and used >= most:
        return (f"it is full: {used} bytes of {most} (maxmemory) are used",)
    return ()


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__
