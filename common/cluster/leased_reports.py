"""Small JSON reports in Redis, each under a lease of its own: who is there, and what it last said of itself.

    {namespace}:{kind}s        set     names that were announced and not yet seen gone
    {namespace}:{kind}:{name}  string  the report; it is gone unless it is announced again within the lease

For people and for the autoscaler: no request depends on them. What is read may have been written by anybody.
"""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from common.cluster.redis import REDIS_ERRORS, connect
from common.cluster.scripts import LIVE

TIMEOUT_S = 0.5
MAX_REPORT_BYTES = 2048
# The list of names outlives the leases in it: only when it stays empty for long does it go.
_LIST_TTL_LEASES = 20


class LeasedReports:
    """One process's access to the reports of a kind. Owns its connections; close it."""

    def __init__(self, redis_url: str, namespace: str, kind: str, lease_s: float) -> None:
        self._redis = connect(redis_url, TIMEOUT_S, max_connections=2)
        self._live = self._redis.register_script(LIVE)
        self._names_key = f"{namespace}:{kind}s"
        self._prefix = f"{namespace}:{kind}:"
        self._lease_ms = int(lease_s * 1000)

    async def announce(self, name: str, report: Mapping[str, object]) -> bool:
        """Say what is, for one lease. False when Redis can't be asked."""
        value = json.dumps(report)
        assert len(value) <= MAX_REPORT_BYTES, f"a report of {len(value)} bytes"
        try:
            async with asyncio.timeout(TIMEOUT_S), self._redis.pipeline(transaction=True) as pipe:
                pipe.set(self._prefix + name, value, px=self._lease_ms)
                pipe.sadd(self._names_key, name)
                pipe.pexpire(self._names_key, self._lease_ms * _LIST_TTL_LEASES)
                await pipe.execute()
        except REDIS_ERRORS:
            return False
        return True

    async def live(self) -> dict[str, dict[str, Any]] | None:
        """Reports by name; None when Redis can't be asked. What is no JSON object is left out."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                answer = await self._live(keys=[self._names_key], args=[self._prefix, MAX_REPORT_BYTES])
        except REDIS_ERRORS:
            return None
        pairs = sorted(zip(answer[::2], answer[1::2], strict=True))
        reports = {name.decode(errors="replace"): _object(value) for name, value in pairs}
        return {name: report for name, report in reports.items() if report is not None}

    async def withdraw(self, name: str) -> None:
        """Be gone at once. Best effort: the report expires in any case."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._redis.delete(self._prefix + name)
                await self._redis.srem(self._names_key, name)
        except REDIS_ERRORS:
            return

    async def aclose(self) -> None:
        await self._redis.aclose()


def _object(value: bytes) -> dict[str, Any] | None:
    try:
        loaded = json.loads(value)
    except (ValueError, RecursionError):
        return None
    return loaded if isinstance(loaded, dict) else None
