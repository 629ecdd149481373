"""Hosts the pools on Ray: performs what `deploy.scaling.pools` decides, and keeps Redis informed.

One actor is one process of a worker, whatever roles it takes in its life. Ray never restarts it (a restarted actor
would run calls meant for the dead one): the pool core replaces it with a new actor, which draws a new incarnation.
"""

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from common.cluster.pools import PoolStore
from common.cores.core_loop import CoreLoop
from common.values.config import ClusterConfig
from common.values.messages import Role
from common.worker.role_change import RoleChangeRefused, check_role_change
from deploy.ray.placement import Placement
from deploy.scaling.autoscale_loop import AutoscaleLoop
from deploy.scaling.pool_members import Identity, PoolStatus
from deploy.scaling.pools import (
    Begun,
    ChangeRole,
    DrainWorker,
    KillWorker,
    PoolCore,
    PoolEffect,
    PoolEvent,
    PoolLimits,
    RoleRefused,
    SizesSet,
    StartWorker,
    WorkerEnded,
    WorkerReady,
)

ANNOUNCE_INTERVAL_S = 0.5
# One look at whether a worker has ended; its end is reported at once in any case.
WAIT_S = 5.0
# A look that takes so much longer: the worker is frozen, though Ray sees a process. It is ended and replaced.
SILENCE_S = 20.0
# An actor without a process by then is said to wait, and for what.
PLACING_S = 20.0
_MAX_REASON_CHARS = 400
# What Ray knows of a dead process, before its guesses.
_EXIT_DETAIL = re.compile(r"exit detail: (.*?)(?= Some common causes| For example|$)", re.IGNORECASE)
_CREATION_FAILED = "error raised in its creation task"

# (worker id, what happened to it, in words)
Report = Callable[[str, str], None]


@dataclass(slots=True, eq=False)
class _Life:
    """One actor: the first role that we knew it in, and its name of now. The handle is Ray's, which has no type."""

    role: Role
    worker_id: str
    handle: Any


class RayPools:
    """Owns the actors of one cluster. Make it inside the running loop; `run` does the work, `empty` ends it."""

    def __init__(
        self, config: ClusterConfig, report: Report, placement: Placement, autoscaler: AutoscaleLoop | None = None
    ) -> None:
        self.changed = asyncio.Event()
        self._placement = placement
        self._report = report
        self._autoscaler = autoscaler
        self._configured = {"prefill": config.pools.prefill, "decode": config.pools.decode}
        self._core = PoolCore(_limits(config, placement))
        self._loop: CoreLoop[PoolEvent, PoolEffect] = CoreLoop(self._core, self._perform)
        self._lives: dict[str, _Life] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._kept: dict[str, int] = {}
        self._requested: dict[str, int] = {}
        self._request_trouble = ""
        self._is_emptying = False
        self._has_begun = asyncio.Event()

    async def run(self, store: PoolStore) -> None:
        """Bring the pools to their configured sizes and keep them at whatever Redis asks for, until cancelled."""
        async with asyncio.TaskGroup() as self._tasks:
            await self._begin(store)
            if self._autoscaler is not None:
                self._tasks.create_task(self._autoscaler.run(store))
            while True:
                wanted = await store.announce(self._core.desired(), self._status_json())
                if wanted is not None and wanted != self._core.desired() and not self._is_emptying:
                    self.resize(wanted["prefill"], wanted["decode"])
                if self._placement.is_lasting:
                    await self._make_last(store)
                await asyncio.sleep(ANNOUNCE_INTERVAL_S)

    def resize(self, prefill: int, decode: int) -> None:
        self._loop.post(SizesSet(((Role.PREFILL, prefill), (Role.DECODE, decode))))
        self._note_change()

    async def empty(self) -> None:
        """Drain and end every worker; returns when all are gone. Bounded by the drain grace."""
        self._is_emptying = True
        await self._has_begun.wait()
        self.resize(0, 0)
        while self._core.num_members:
            self.changed.clear()
            await self.changed.wait()

    def kill_all(self) -> None:
        """End every worker now."""
        for life in list(self._lives.values()):
            _kill(life.handle)

    def status(self) -> list[PoolStatus]:
        return self._core.status(time.monotonic())

    async def _begin(self, store: PoolStore) -> None:
        """Take over what an earlier controller left; without Redis, no found worker is one too many."""
        assert self._tasks is not None
        found = await asyncio.to_thread(self._placement.find)
        kept = await store.get_kept(self._configured) if self._placement.is_lasting else None
        first = await store.announce(kept or self._configured, {})
        if first is None:
            num_found = Counter(worker.role.value for worker in found)
            first = {role: max(size, num_found[role]) for role, size in self._configured.items()}
        if self._is_emptying:
            first = dict.fromkeys(first, 0)
        self._lives |= {worker.worker_id: _Life(worker.role, worker.worker_id, worker.handle) for worker in found}
        sizes = tuple((role, first[role.value]) for role in Role)
        taken_over = tuple((Identity(worker.role, worker.worker_id), worker.placed_as) for worker in found)
        lives = list(self._lives.values())
        self._loop.post(Begun(sizes, taken_over))
        for life in lives:
            self._tasks.create_task(self._follow(life))
        self._has_begun.set()
        if problem := self._core.change_problem:
            self._report("pools", f"no worker can change its role: {problem}")
        self._note_change()

    async def _make_last(self, store: PoolStore) -> None:
        """Remember the sizes, and ask for nodes: for leaving and changed workers too, whose nodes are in use."""
        desired = self._core.desired()
        if self._kept != desired and not self._is_emptying and await store.keep(self._configured, desired):
            self._kept = desired
        needed = self._core.places()
        if self._requested != needed and await self._request_nodes(needed):
            self._requested = needed

    async def _request_nodes(self, needed: dict[str, int]) -> bool:
        """Whether Ray has heard of it. If not it is asked again, and the trouble logged when it is a new one."""
        try:
            await asyncio.to_thread(self._placement.request_nodes, needed)
        except Exception as error:  # Ray's own and gRPC's; actors that wait for a node are a request, too
            trouble = reason_of(error)
            if trouble != self._request_trouble:
                self._report("ray", f"nodes cannot be asked for: {trouble}")
            self._request_trouble = trouble
            return False
        self._request_trouble = ""
        return True

    def _status_json(self) -> dict[str, object]:
        autoscaled = self._autoscaler.status() if self._autoscaler is not None else {}
        return {
            status.role.value: {
                **asdict(status),
                "autoscale": autoscaled.get(status.role.value),
                "change_problem": self._core.change_problem,
            }
            for status in self.status()
        }

    def _note_change(self) -> None:
        self._core.check_invariants()
        self.changed.set()

    def _perform(self, effect: PoolEffect) -> None:
        assert self._tasks is not None
        match effect:
            case StartWorker(role, worker_id):
                life = self._lives[worker_id] = _Life(role, worker_id, self._placement.create(role, worker_id))
                self._tasks.create_task(self._follow(life))
            case ChangeRole():
                self._tasks.create_task(self._change(self._lives[effect.from_worker_id], effect))
                self._rename(effect.from_worker_id, effect.worker_id)
            case DrainWorker(worker_id, grace_s):
                self._report(worker_id, "draining")
                self._lives[worker_id].handle.drain.remote(grace_s)
            case KillWorker(worker_id):
                _kill(self._lives[worker_id].handle)

    def _rename(self, worker_id: str, other_id: str) -> None:
        life = self._lives[other_id] = self._lives.pop(worker_id)
        life.worker_id = other_id

    async def _follow(self, life: _Life) -> None:
        """One actor, from its start to its end."""
        self._report(life.worker_id, f"starting the {life.role.value} worker")
        started_s = time.monotonic()
        reason = ""
        try:
            description = await self._started(life)
            self._report(life.worker_id, _ready_text(description, time.monotonic() - started_s))
            self._loop.post(WorkerReady(life.worker_id))
            self._note_change()
            while not await _has_ended(life.handle):
                pass
        except Exception as error:  # whatever ended a worker's process: it becomes an event with its reason
            reason = reason_of(error)
        _kill(life.handle)
        del self._lives[life.worker_id]
        self._report(life.worker_id, self._end_text(life.worker_id, reason))
        self._loop.post(WorkerEnded(life.worker_id, reason))
        self._note_change()

    def _end_text(self, worker_id: str, reason: str) -> str:
        if reason:
            return f"ended: {reason}"
        is_wanted = self._core.is_wanted(worker_id)
        return "has drained and ended, as it was asked; its pool replaces it" if is_wanted else "ended"

    async def _change(self, life: _Life, change: ChangeRole) -> None:
        """A change of role, to its end, unless the process ends before: `_follow` reports that."""
        self._report(change.from_worker_id, f"changing to {change.role.value}, as {change.worker_id}")
        started_s = time.monotonic()
        config = self._placement.worker_config(change.role, change.worker_id)
        event: PoolEvent = WorkerReady(change.worker_id)
        try:
            description = await life.handle.change_role.remote(config.model_dump_json(), change.grace_s)
            text = _ready_text(description, time.monotonic() - started_s)
        except Exception as error:  # Ray's own, with the worker's inside
            if not isinstance(getattr(error, "cause", None), RoleChangeRefused):
                return
            text = f"cannot change to {change.role.value}: {reason_of(error)}"
            event = RoleRefused(change.worker_id, reason_of(error))
        if self._lives.get(change.worker_id) is not life:
            return
        if isinstance(event, RoleRefused):
            self._rename(change.worker_id, change.from_worker_id)
        self._report(life.worker_id, text)
        self._loop.post(event)
        self._note_change()

    async def _started(self, life: _Life) -> Any:
        """The worker's description, once it is ready."""
        notice = asyncio.create_task(self._tell_if_waiting(life))
        try:
            return await life.handle.start.remote()
        finally:
            notice.cancel()
            await asyncio.gather(notice, return_exceptions=True)

    async def _tell_if_waiting(self, life: _Life) -> None:
        try:
            await asyncio.wait_for(_result(life.handle.__ray_ready__.remote()), PLACING_S)
        except TimeoutError:
            self._report(
                life.worker_id, f"not started after {PLACING_S:g} s: {self._placement.what_it_waits_for(life.role)}"
            )


def _limits(config: ClusterConfig, placement: Placement) -> PoolLimits:
    pools = config.pools
    problem = _change_problem(placement) if pools.change_roles else "pools.change_roles is off"
    return PoolLimits(pools.drain_grace_s, pools.start_limit_s, pools.change_grace_s, problem)


def _change_problem(placement: Placement) -> str:
    """Why no worker of this cluster can take the other role; empty when all can."""
    configs = [placement.worker_config(role, "") for role in Role]
    try:
        check_role_change(*configs)
    except RoleChangeRefused as error:
        return error.message
    return ""


async def _has_ended(handle: Any) -> bool:
    """Looks for `WAIT_S`. Raises TimeoutError for a worker that does not even answer the question."""
    try:
        async with asyncio.timeout(WAIT_S + SILENCE_S):
            return bool(await handle.wait.remote(WAIT_S))
    except TimeoutError:
        raise TimeoutError(f"it has not answered for {SILENCE_S:g} s") from None


async def _result(reference: Any) -> None:
    await reference


def _ready_text(description: dict[str, Any], took_s: float) -> str:
    return f"ready after {took_s:.1f} s (pid {description['pid']}, {description['address']})"


def _kill(handle: Any) -> None:
    import ray

    ray.kill(handle, no_restart=True)


def reason_of(error: Exception) -> str:
    """What to tell an operator: the cause inside Ray's wrapping, without its advice and stack traces."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException):
        return f"{type(cause).__name__}: {cause}"[:_MAX_REASON_CHARS]
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and _CREATION_FAILED in lines[0]:
        return lines[-1][:_MAX_REASON_CHARS]  # of the traceback: what was raised
    if detail := _EXIT_DETAIL.search(" ".join(lines)):
        return f"its process died: {detail.group(1)}"[:_MAX_REASON_CHARS]
    return (lines[0] if lines else type(error).__name__)[:_MAX_REASON_CHARS]
