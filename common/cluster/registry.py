"""Who lives: leased registrations in Redis, written by workers, read by routers.

Time to live is relative and kept by Redis alone, so no two clocks are ever compared.
"""

import asyncio
import json
from dataclasses import asdict, dataclass

from common.cluster.keys import Keys
from common.cluster.protocol import Registration
from common.cluster.redis import REDIS_ERRORS, connect, wait_for_event
from common.cluster.scripts import LIVE, RENEW
from common.telemetry.logs import get_logger
from common.values.ids import WorkerRef
from common.values.messages import Role

TIMEOUT_S = 0.5
# The list of names outlives the leases in it: only a cluster that is gone altogether loses it.
LIST_TTL_LEASES = 20
MAX_REGISTRATION_BYTES = 2048


class RedisRegistry:
    """The router's view. Owns its connections; close it."""

    def __init__(self, redis_url: str, namespace: str) -> None:
        self.num_invalid = 0
        self.problem = ""
        self._redis = connect(redis_url, TIMEOUT_S, max_connections=2)
        self._live = self._redis.register_script(LIVE)
        self._keys = Keys(namespace)

    async def live_workers(self) -> list[Registration] | None:
        """All workers with a lease; None when Redis can't be asked. Values that make no sense are left out."""
        prefix = f"{self._keys.namespace}:worker:"
        try:
            async with asyncio.timeout(TIMEOUT_S):
                answer = await self._live(keys=[self._keys.workers], args=[prefix, MAX_REGISTRATION_BYTES])
        except REDIS_ERRORS as error:
            self._note(f"Redis does not say which workers there are: {str(error) or type(error).__name__}")
            return None
        self._note("")
        found = [decode(ref, value) for ref, value in zip(answer[::2], answer[1::2], strict=True)]
        self.num_invalid += found.count(None)
        return [registration for registration in found if registration is not None]

    async def close(self) -> None:
        await self._redis.aclose()

    def _note(self, problem: str) -> None:
        """One line when it begins and one when it is over."""
        if problem and not self.problem:
            get_logger().warning("registry_away", reason=problem)
        elif self.problem and not problem:
            get_logger().info("registry_back")
        self.problem = problem


@dataclass(frozen=True, slots=True)
class _Fields:
    worker_id: str
    incarnation: str
    role: str
    address: str


def encode(registration: Registration) -> bytes:
    """The value of a lease key."""
    return json.dumps(asdict(_Fields(*registration.ref, registration.role.value, registration.address))).encode()


def decode(ref_text: bytes, value: bytes) -> Registration | None:
    """Inverse of `encode`; None for anything that no worker of ours writes. Anyone may have written `value`."""
    try:
        loaded = json.loads(value)
        fields = _Fields(**loaded)
        if not all(isinstance(part, str) for part in loaded.values()):
            return None
        registration = Registration(WorkerRef(fields.worker_id, fields.incarnation), Role(fields.role), fields.address)
    except (ValueError, TypeError, RecursionError):
        return None
    is_ours = str(registration.ref).encode() == ref_text and _is_address(fields.address)
    return registration if is_ours else None


def _is_address(text: str) -> bool:
    host, separator, port = text.rpartition(":")
    is_host = bool(host) and host.isascii() and all(char.isalnum() or char in ".-:[]_" for char in host)
    return bool(separator) and is_host and port.isdecimal() and port.isascii() and 0 < int(port) < 65536


class Lease:
    """One worker's registration, kept alive by `run`. Owns its connections; close it."""

    def __init__(self, redis_url: str, namespace: str, registration: Registration, lease_s: float) -> None:
        self._redis = connect(redis_url, TIMEOUT_S, max_connections=2)
        self._renew = self._redis.register_script(RENEW)
        self._ref = registration.ref
        self._value = encode(registration)
        self._keys = Keys(namespace)
        self._lease_s = lease_s
        self._is_refused = False
        self._is_closing = asyncio.Event()

    async def renew(self) -> bool:
        """Register, or prolong; False when Redis could not be reached."""
        keys, ref = self._keys, self._ref
        ttl_ms = int(self._lease_s * 1000)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._renew(
                    keys=[keys.lease(ref), keys.workers, keys.members(ref), keys.sequence(ref)],
                    args=[ttl_ms, ttl_ms * LIST_TTL_LEASES, str(ref), self._value],
                )
        except REDIS_ERRORS as error:
            if not self._is_refused:
                get_logger().warning("lease_not_renewed", worker=str(ref), reason=str(error) or type(error).__name__)
            self._is_refused = True
            return False
        self._is_refused = False
        return True

    async def run(self) -> None:
        """Renew every third of the lease, until `stop`. Redis may come and go."""
        while not self._is_closing.is_set():
            await self.renew()
            await wait_for_event(self._is_closing, self._lease_s / 3)

    def stop(self) -> None:
        """Have `run` return, after the round that it is in."""
        self._is_closing.set()

    async def deregister(self) -> None:
        """Give the lease back, so that no replacement waits for it to expire. Best effort."""
        keys, ref = self._keys, self._ref
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._redis.delete(keys.lease(ref), keys.members(ref), keys.sequence(ref))
                await self._redis.srem(keys.workers, str(ref))
        except REDIS_ERRORS:
            return

    async def close(self) -> None:
        await self._redis.aclose()
