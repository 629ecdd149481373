"""Waits for a cluster to become what was asked for, by looking at a router's state again and again."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from deploy.client.admin import AdminClient, Unhealthy
from deploy.client.show import loading_text

ROLES = ("prefill", "decode")
_POLL_INTERVAL_S = 0.2

State = Mapping[str, Any]
Report = Callable[[str], None]
# What is missing, in words; empty = nothing, and the wait is over.
Missing = Callable[[State], str]


def wait_for_sizes(client: AdminClient, sizes: Mapping[str, int], timeout_s: float, report: Report) -> None:
    """Return when each pool has exactly so many workers, all of them ready. Raises Unhealthy after `timeout_s`."""
    _wait(client, lambda state: missing_of_sizes(state, sizes), timeout_s, report)


def wait_until_settled(client: AdminClient, timeout_s: float, report: Report) -> None:
    """Return when every pool is what it is to be and a request would be served. Raises Unhealthy after `timeout_s`."""
    _wait(client, lambda state: missing_of_all(state, client.readiness()), timeout_s, report)


def wait_until_gone(client: AdminClient, worker: Mapping[str, Any], timeout_s: float) -> None:
    """Return when the router no longer sees this life of the worker. Raises Unhealthy after `timeout_s`."""

    def missing(state: State) -> str:
        is_there = any(other["incarnation"] == worker["incarnation"] for other in state["workers"])
        return f"{worker['worker_id']} is still draining" if is_there else ""

    _wait(client, missing, timeout_s, lambda text: None)


def missing_of_sizes(state: State, sizes: Mapping[str, int]) -> str:
    """Which workers are not there yet, or still there; empty when each pool has its size."""
    now = {role: _count(state["workers"], role) for role in sizes}
    if all(now[role] == (size, size) for role, size in sizes.items()):
        return ""
    parts = [f"{role} {ready} ready of {sizes[role]}" for role, (ready, _) in now.items()]
    loading = [f"{worker['worker_id']}: {loading_text(worker)}" for worker in state.get("loading", ())]
    return ", ".join([*parts, *_changes(state.get("pools") or {}), *loading])


def missing_of_all(state: State, readiness: Mapping[str, Any]) -> str:
    """As `missing_of_sizes`, for the sizes that the pool controller keeps, or else for those that there are."""
    pools = state.get("pools") or {}
    sizes = {role: pools[role]["desired"] if role in pools else _count(state["workers"], role)[1] for role in ROLES}
    missing = missing_of_sizes(state, sizes)
    if not missing and readiness["status"] != "ready":
        return ", ".join(readiness.get("reasons") or ["the router is not ready"])
    return missing


def _wait(client: AdminClient, missing: Missing, timeout_s: float, report: Report) -> None:
    deadline_s = time.monotonic() + timeout_s
    said = ""
    while text := missing(client.state()):
        if text != said:
            report(text)
            said = text
        if time.monotonic() > deadline_s:
            raise Unhealthy(f"after {timeout_s:.0f} s: {text}")
        time.sleep(_POLL_INTERVAL_S)


def _changes(pools: Mapping[str, Any]) -> list[str]:
    """Workers on their way from one pool to the other."""
    moving = [change for pool in pools.values() for change in pool.get("changing", ())]
    return [f"{change['from_worker_id']} changes to {change['worker_id']}" for change in moving]


def _count(workers: list[dict[str, Any]], role: str) -> tuple[int, int]:
    """How many of the role are ready, how many there are in all."""
    members = [worker for worker in workers if worker["role"] == role]
    return sum(worker["state"] == "ready" for worker in members), len(members)
