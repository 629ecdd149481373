"""What routers and loading workers say of themselves under leases, for people and for the autoscaler.

The field names are those of `/admin/v1/state`. The first field is the name that the report is kept under.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from common.cluster.leased_reports import LeasedReports

ROUTER_LEASE_S = 4.0
# The thread that loads may keep the interpreter for as long as it reads one large tensor.
LOADING_LEASE_S = 10.0


@dataclass(frozen=True, slots=True)
class RouterReport:
    """A router as the others see it."""

    router_id: str
    http_url: str
    grpc_address: str
    pid: int
    is_ready: bool = False
    num_running: int = 0
    num_queued: int = 0


@dataclass(frozen=True, slots=True)
class LoadingWorker:
    """A worker that is not ready yet, as it says itself. `share` of the phase is done."""

    worker_id: str
    role: str
    phase: str
    share: float
    elapsed_s: float


ReportT = TypeVar("ReportT", RouterReport, LoadingWorker)


def router_reports(redis_url: str, namespace: str) -> LeasedReports:
    """What the routers of a cluster say of themselves."""
    return LeasedReports(redis_url, namespace, "router", ROUTER_LEASE_S)


def loading_reports(redis_url: str, namespace: str) -> LeasedReports:
    """What the workers of a cluster say of themselves until they are ready."""
    return LeasedReports(redis_url, namespace, "loading", LOADING_LEASE_S)


def parsed(kind: type[ReportT], found: Mapping[str, Mapping[str, Any]]) -> tuple[ReportT, ...]:
    """The reports that make sense, by name; anybody may have written the others."""
    types = {field.name: field.type for field in fields(kind)}
    name_field = next(iter(types))
    return tuple(
        kind(**report)
        for name, report in found.items()
        if {key: type(value) for key, value in report.items()} == types and report[name_field] == name
    )
