"""LoRA adapters that were loaded while the cluster serves, shared in Redis between its routers.

    {namespace}:adapters  hash  name -> digest, path and when it was loaded, as JSON; "" -> a mark

It lives on without routers: one that starts later serves them too. Where the mark is missing Redis is new, or has lost
what it held: then nothing has been unloaded, and routers say again what they know.
"""

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from common.cluster.redis import REDIS_ERRORS, connect
from common.values.errors import PdserveError

TIMEOUT_S = 0.5
MAX_RECORD_BYTES = 1 << 14
_MARK = ""  # the name of no adapter


class AdapterRecord(msgspec.Struct, frozen=True):
    """`created_s`: Unix time."""

    digest: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]  # an empty one would mean the model itself
    path: str
    created_s: int


@dataclass(frozen=True, slots=True)
class AdapterRecords:
    """`is_whole` False: others may have been there, and are not by accident."""

    by_name: Mapping[str, AdapterRecord]
    is_whole: bool


class AdapterStore:
    """One process's access. Owns its connections; close it."""

    def __init__(self, redis_url: str, namespace: str) -> None:
        self._redis = connect(redis_url, TIMEOUT_S, max_connections=2)
        self._key = f"{namespace}:adapters"

    async def all(self) -> AdapterRecords | None:
        """None when Redis is away. What is no record of ours is left out."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                found = await self._redis.hgetall(self._key)
        except REDIS_ERRORS:
            return None
        records = {}
        for name, value in found.items():
            assert isinstance(name, bytes)  # this client decodes nothing
            try:
                records[name.decode()] = msgspec.json.decode(value[:MAX_RECORD_BYTES], type=AdapterRecord)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue
        return AdapterRecords(records, _MARK.encode() in found)

    async def put(self, name: str, record: AdapterRecord) -> None:
        """Raises PdserveError when Redis is away."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._redis.hset(self._key, name, msgspec.json.encode(record))
        except REDIS_ERRORS as error:
            raise PdserveError("Redis cannot be reached: the adapters are as they were") from error

    async def restore(self, records: Mapping[str, AdapterRecord]) -> None:
        """Make it whole with these. Without Redis nothing happens."""
        content: dict[Any, Any] = {name: msgspec.json.encode(record) for name, record in records.items()}
        with contextlib.suppress(*REDIS_ERRORS):
            async with asyncio.timeout(TIMEOUT_S):
                await self._redis.hset(self._key, mapping={**content, _MARK: b"1"})

    async def remove(self, name: str) -> None:
        """Raises PdserveError when Redis is away."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._redis.hdel(self._key, name)
        except REDIS_ERRORS as error:
            raise PdserveError("Redis cannot be reached: the adapters are as they were") from error

    async def close(self) -> None:
        await self._redis.aclose()
