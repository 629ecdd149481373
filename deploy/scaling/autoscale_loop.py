"""Feeds the autoscaler what the routers see, and writes the sizes that it decides where the pool controller reads them.

Any router knows the workers, their work from every router, and what the other routers have queued: the first that
answers is asked. No router, no Redis or a state that makes no sense mean that nothing is known: sizes stay as they
are. No decisions here.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from common.cluster.pools import PoolStore
from common.values.config import AutoscaleSettings
from common.values.errors import PdserveError
from common.values.messages import Role
from deploy.client.admin import AdminClient, AdminFailed
from deploy.scaling.autoscaler import Autoscaler, PoolLoad, WorkerLoad

INTERVAL_S = 1.0
# Workers report four times a second, however busy they are.
MAX_SILENT_S = 5.0

Report = Callable[[str, str], None]


class AutoscaleLoop:
    """Owns the autoscaler of one cluster. `run` it beside the pool controller."""

    def __init__(self, settings: AutoscaleSettings, clients: Sequence[AdminClient], report: Report) -> None:
        self._autoscaler = Autoscaler(settings)
        self._clients = list(clients)
        self._report = report
        self._problem = "nothing is known of the load yet"
        self._blind: set[Role] = set()

    async def run(self, store: PoolStore) -> None:
        """Look once per interval, until cancelled."""
        while True:
            try:
                await self._look(store)
                self._problem = ""
            except (AdminFailed, PdserveError) as error:
                self._problem = str(error)
            await asyncio.sleep(INTERVAL_S)

    def status(self) -> dict[str, dict[str, object]]:
        """Per pool, what was decided and why; `problem` = why nothing is decided now."""
        decided = self._autoscaler.status(time.monotonic())
        return {role.value: {**decided.get(role.value, {}), "problem": self._problem} for role in Role}

    async def _look(self, store: PoolStore) -> None:
        state = await asyncio.to_thread(self._state)
        sizes = await store.get_desired()
        if sizes is None:
            raise PdserveError("the pool sizes cannot be read from Redis")
        loads = {role: pool_load(state, role, sizes[role.value]) for role in Role}
        self._say_blindness(loads)
        changes = [one for one in self._autoscaler.decide_both(loads, time.monotonic()).values() if one.is_change]
        for change in changes:
            self._report("autoscaler", f"{change.role.value} {change.size} -> {change.desired}: {change.reason}")
        if changes:  # at once: what leaves one pool may be what the other lacks
            await store.set_desired({change.role.value: change.desired for change in changes})

    def _say_blindness(self, loads: Mapping[Role, PoolLoad]) -> None:
        """Once when it begins and once when it ends."""
        for role, load in loads.items():
            if load.blindness and role not in self._blind:
                self._report("autoscaler", f"{role.value} is held, {load.blindness}")
            elif role in self._blind and not load.blindness:
                self._report("autoscaler", f"{role.value}: all workers report again")
        self._blind = {role for role, load in loads.items() if load.blindness}

    def _state(self) -> Mapping[str, Any]:
        """As a router says; one that does not answer is asked last from then on. Raises AdminFailed."""
        problem = AdminFailed("no router is known")
        for _ in self._clients:
            try:
                return self._clients[0].state()
            except AdminFailed as failed:
                problem = failed
                self._clients = [*self._clients[1:], self._clients[0]]
        raise problem


def pool_load(state: Mapping[str, Any], role: Role, size: int) -> PoolLoad:
    """A pool as `/admin/v1/state` shows it. Requests that wait in a router wait for a decode worker's grant.

    A worker that was silent for too long does not report. Raises PdserveError for what no router says.
    """
    try:
        ready = [worker for worker in state["workers"] if worker["role"] == role.value and worker["state"] == "ready"]
        heard = [worker for worker in ready if 0 <= worker.get("silent_s", 0.0) <= MAX_SILENT_S]
        num_queued = sum(int(router["num_queued"]) for router in state["routers"]) if role is Role.DECODE else 0
        return PoolLoad(size, tuple(map(_worker_load, heard)), num_queued)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PdserveError(f"the router's state makes no sense: {type(error).__name__}: {error}") from error


def _worker_load(worker: Mapping[str, Any]) -> WorkerLoad:
    return WorkerLoad(
        num_running=worker["running"],
        num_waiting=worker["waiting"],
        num_waiting_tokens=worker["waiting_uncached_tokens"],
        num_blocks_used=worker["kv_blocks_used"] + worker["kv_blocks_held"],
        num_blocks=worker["kv_blocks_total"],
        max_num_seqs=worker["max_num_seqs"],
        tokens_per_s=worker["prefill_tokens_per_s"],
        step_s=worker["step_s"],
    )
