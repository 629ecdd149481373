"""Desired and actual pool sizes, shared in Redis between a pool controller, routers and the command line.

    {namespace}:pools         hash    prefill, decode: how many workers are wanted
    {namespace}:pools:status  string  what the controller sees, as JSON
    {namespace}:pools:kept    string  the last sizes and the configured ones that they changed, as JSON

The controller owns both and keeps them alive: keys that are gone mean that no controller runs. Others only change a
size that exists. Kept sizes live on: a controller that begins takes them, unless it was configured anew.
"""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from common.cluster.redis import REDIS_ERRORS, connect
from common.values.errors import InvalidRequest, PdserveError

TTL_S = 10
TIMEOUT_S = 0.5
ROLES = ("prefill", "decode")
MAX_REPLICAS = 1024

# KEYS: sizes, status. ARGV: ttl s, prefill, decode, status. Writes the controller's sizes only where Redis has none
# (the start, or a Redis that lost them), so that a change made meanwhile by somebody else wins. Answers the sizes.
_ANNOUNCE = """
if redis.call('EXISTS', KEYS[1]) == 0 then redis.call('HSET', KEYS[1], 'prefill', ARGV[2], 'decode', ARGV[3]) end
redis.call('EXPIRE', KEYS[1], tonumber(ARGV[1]))
redis.call('SET', KEYS[2], ARGV[4], 'EX', tonumber(ARGV[1]))
return redis.call('HMGET', KEYS[1], 'prefill', 'decode')
"""

# KEYS: sizes. ARGV: role, replicas, and so on.
_RESIZE = """
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
redis.call('HSET', KEYS[1], unpack(ARGV))
return 1
"""


class PoolStore:
    """One process's access to the pool sizes of a cluster. Owns its connections; close it."""

    def __init__(self, redis_url: str, namespace: str) -> None:
        self._redis = connect(redis_url, TIMEOUT_S, max_connections=2)
        self._announce = self._redis.register_script(_ANNOUNCE)
        self._resize = self._redis.register_script(_RESIZE)
        self._sizes_key = f"{namespace}:pools"
        self._status_key = f"{namespace}:pools:status"
        self._kept_key = f"{namespace}:pools:kept"

    async def set_desired(self, sizes: Mapping[str, int]) -> None:
        """Ask the controller for other sizes, of one pool or of both at once, so that workers may change their role.

        Raises InvalidRequest when none runs or a size makes no sense.
        """
        args: list[str | int] = []
        for role, replicas in sizes.items():
            if role not in ROLES:
                raise InvalidRequest("role must be prefill or decode", param="role")
            if not 0 <= replicas <= MAX_REPLICAS:
                raise InvalidRequest(f"replicas must be between 0 and {MAX_REPLICAS}", param="replicas")
            args += [role, replicas]
        try:
            async with asyncio.timeout(TIMEOUT_S):
                is_set = await self._resize(keys=[self._sizes_key], args=args)
        except REDIS_ERRORS as error:
            raise PdserveError("Redis cannot be reached: the pool sizes are as they were") from error
        if not is_set:
            raise InvalidRequest("no pool controller runs in this cluster: sizes are set where workers are started")

    async def get_desired(self) -> dict[str, int] | None:
        """The sizes asked for; None when no controller runs or Redis is away."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return _sizes(await self._redis.hmget(self._sizes_key, list(ROLES)))
        except REDIS_ERRORS:
            return None

    async def get_status(self) -> dict[str, Any] | None:
        """What the controller last said; None when none runs or Redis is away.

        The desired sizes are those of now: a size that was set since the controller's last heartbeat is among them.
        """
        try:
            async with asyncio.timeout(TIMEOUT_S):
                pipeline = self._redis.pipeline(transaction=False)
                pipeline.getrange(self._status_key, 0, 1 << 16)
                pipeline.hmget(self._sizes_key, list(ROLES))
                value, sizes = await pipeline.execute()
            status = json.loads(value)
        except (*REDIS_ERRORS, ValueError):
            return None
        if not isinstance(status, dict):
            return None
        for role, size in (_sizes(sizes) or {}).items():
            if isinstance(status.get(role), dict):
                status[role]["desired"] = size
        return status

    async def announce(self, desired: Mapping[str, int], status: Mapping[str, object]) -> dict[str, int] | None:
        """The controller's heartbeat: say what is, learn what is wanted. None when Redis can't be asked."""
        args: list[str | int] = [TTL_S, desired["prefill"], desired["decode"], json.dumps(status)]
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return _sizes(await self._announce(keys=[self._sizes_key, self._status_key], args=args))
        except REDIS_ERRORS:
            return None

    async def keep(self, configured: Mapping[str, int], desired: Mapping[str, int]) -> bool:
        """Remember sizes beyond the controller's life. False when Redis can't be asked."""
        value = json.dumps({"configured": dict(configured), "desired": dict(desired)})
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return bool(await self._redis.set(self._kept_key, value))
        except REDIS_ERRORS:
            return False

    async def get_kept(self, configured: Mapping[str, int]) -> dict[str, int] | None:
        """The sizes of the last controller that was configured alike; None when there are none."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                value = await self._redis.getrange(self._kept_key, 0, 1 << 10)
            kept = json.loads(value)
            is_alike = kept["configured"] == dict(configured)
            return _sizes([str(kept["desired"][role]).encode() for role in ROLES]) if is_alike else None
        except (*REDIS_ERRORS, ValueError, KeyError, TypeError):
            return None

    async def withdraw(self) -> None:
        """The controller ends: sizes can be changed no more. Best effort, the keys expire in any case."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._redis.delete(self._sizes_key, self._status_key)
        except REDIS_ERRORS:
            return

    async def close(self) -> None:
        await self._redis.aclose()


def _sizes(values: list[Any]) -> dict[str, int] | None:
    """Both sizes, or None if one is missing or was not written by us."""
    if not all(isinstance(value, bytes) and value.isdigit() and len(value) <= 4 for value in values):
        return None
    return dict(zip(ROLES, map(int, values), strict=True))
