"""grpc.health.v1 from what the front end knows: "" is liveness, the service's name is readiness."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from router.front.grpc.errors import Context
from router.front.service_protocol import Readiness
from router.request import limits

# How soon a watcher hears of a change; probes poll at a second or more.
_WATCH_INTERVAL_S = 0.2


class ReadinessHealth(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # the package has no types
    """Holds no status of its own, so it cannot be out of date."""

    def __init__(self, readiness: Callable[[], Readiness], service_name: str) -> None:
        self._readiness = readiness
        self._service_name = service_name
        self._num_watchers = 0

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> Any:
        status = self._status(request.service)
        if status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        """The status now, and again whenever it changes. Open to strangers, so bounded."""
        if self._num_watchers >= limits.MAX_HEALTH_WATCHERS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many watch already; use Check")
        self._num_watchers += 1
        try:
            await self._follow(request.service, context)
        finally:
            self._num_watchers -= 1

    async def _follow(self, service: str, context: Context) -> None:
        last = None
        while True:
            status = self._status(service)
            if status != last:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                last = status
            await asyncio.sleep(_WATCH_INTERVAL_S)

    def _status(self, service: str) -> int:
        if service == "":
            return int(health_pb2.HealthCheckResponse.SERVING)
        if service != self._service_name:
            return int(health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
        return int(
            health_pb2.HealthCheckResponse.SERVING
            if self._readiness().is_ready
            else health_pb2.HealthCheckResponse.NOT_SERVING
        )
