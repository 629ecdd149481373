"""Which routers serve this cluster and how loaded they are, and which workers are loading: all say so in Redis.

Owns this router's announcement. Nothing of a request depends on it: routers share workers, index and registry and
need not know each other. People, and the autoscaler that looks through one of them, see the load of all.
"""

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, replace
from urllib.parse import urlsplit

from common.cluster.leased_reports import LeasedReports
from common.cluster.redis import wait_for_event
from common.cluster.reports import LoadingWorker, RouterReport, parsed

INTERVAL_S = 1.0
_ANY_ADDRESS = frozenset({"0.0.0.0", "::", ""})


# (is ready, running, queued) of this router now.
Load = Callable[[], tuple[bool, int, int]]


class RouterRegistry:
    """`run` it while the router serves; `routers` is what it knows. All in one event loop."""

    def __init__(self, reports: LeasedReports, loading: LeasedReports, me: RouterReport, load: Load) -> None:
        self._reports = reports
        self._loading_reports = loading
        self._loading: tuple[LoadingWorker, ...] = ()
        self._me = me
        self._load = load
        self._others: tuple[RouterReport, ...] = ()
        self._is_closing = asyncio.Event()

    def routers(self) -> tuple[RouterReport, ...]:
        """This router as it is now and the others as they last said, by name."""
        return tuple(sorted((self._report(), *self._others), key=lambda router: router.router_id))

    def loading(self) -> tuple[LoadingWorker, ...]:
        """Workers that are being loaded, by name."""
        return self._loading

    async def run(self) -> None:
        """Announce and look, until `stop`. Without Redis nothing is known of the others."""
        while not self._is_closing.is_set():
            await self._reports.announce(self._me.router_id, asdict(self._report()))
            found = await self._reports.live() or {}
            others = parsed(RouterReport, found)
            self._others = tuple(router for router in others if router.router_id != self._me.router_id)
            self._loading = parsed(LoadingWorker, await self._loading_reports.live() or {})
            await wait_for_event(self._is_closing, INTERVAL_S)
        await self._reports.withdraw(self._me.router_id)

    def stop(self) -> None:
        """Have `run` return, after the round that it is in."""
        self._is_closing.set()

    def _report(self) -> RouterReport:
        is_ready, num_running, num_queued = self._load()
        return replace(self._me, is_ready=is_ready, num_running=num_running, num_queued=num_queued)


def own_report(
    router_id: str, host: str, http_port: int, grpc_port: int, redis_url: str, *, has_tls: bool = False
) -> RouterReport:
    """What does not change of this router. Listening on every address, it names the one that Redis is reached from."""
    name = _address_towards(redis_url) if host in _ANY_ADDRESS else host
    shown = f"[{name}]" if ":" in name else name
    scheme = "https" if has_tls else "http"
    return RouterReport(router_id, f"{scheme}://{shown}:{http_port}", f"{shown}:{grpc_port}", os.getpid())


def _address_towards(redis_url: str) -> str:
    """Of this host, for others that share the Redis. Sends nothing: connecting a datagram socket only picks a route."""
    parts = urlsplit(redis_url)
    try:
        family, kind, _, _, address = socket.getaddrinfo(parts.hostname, parts.port or 6379, type=socket.SOCK_DGRAM)[0]
        with closing(socket.socket(family, kind)) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()
