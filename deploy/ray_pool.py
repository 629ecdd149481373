"""Hosts the pools on Ray: performs what `deploy.pools` decides, and keeps Redis informed.

One actor is one life of a worker. Ray never restarts it (a restarted actor would run calls meant for the dead one):
the pool core replaces it with a new actor, which draws a new incarnation.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from common.config import ClusterConfig
from common.core_loop import CoreLoop
from common.messages import Role
from common.pools import PoolStore
from deploy.pools import (
    DrainWorker,
    KillWorker,
    PoolCore,
    PoolEffect,
    PoolEvent,
    PoolStatus,
    SizeSet,
    StartWorker,
    WorkerEnded,
    WorkerReady,
)
from deploy.ray_local import resource_name
from deploy.worker_actor import ACTOR_CLASSES, WorkerActor
from deploy.worker_env import has_gpu, num_cores, num_threads_per_worker, worker_environment, worker_settings

ANNOUNCE_INTERVAL_S = 0.5
_MAX_REASON_CHARS = 400

# (worker id, what happened to it, in words)
Report = Callable[[str, str], None]


class RayPools:
    """Owns the actors of one cluster. Make it inside the running loop; `run` does the work, `empty` ends it."""

    def __init__(
        self, config: ClusterConfig, report: Report, actor_classes: Mapping[Role, str] = ACTOR_CLASSES
    ) -> None:
        self.changed = asyncio.Event()
        self._config = config
        self._actor_classes = actor_classes
        self._report = report
        self._core = PoolCore(config.pools.drain_grace_s)
        self._loop: CoreLoop[PoolEvent, PoolEffect] = CoreLoop(self._core, self._perform)
        self._handles: dict[str, Any] = {}  # Ray's actor handles have no type of their own
        self._tasks: asyncio.TaskGroup | None = None
        self._num_threads = num_threads_per_worker(config, num_cores())
        self._is_emptying = False

    async def run(self, store: PoolStore) -> None:
        """Bring the pools to their configured sizes and keep them at whatever Redis asks for, until cancelled."""
        async with asyncio.TaskGroup() as self._tasks:
            self.resize(self._config.pools.prefill, self._config.pools.decode)
            while True:
                wanted = await store.announce(self._core.desired(), self._status_json())
                if wanted is not None and wanted != self._core.desired() and not self._is_emptying:
                    self.resize(wanted["prefill"], wanted["decode"])
                await asyncio.sleep(ANNOUNCE_INTERVAL_S)

    def resize(self, prefill: int, decode: int) -> None:
        self._loop.post(SizeSet(Role.PREFILL, prefill))
        self._loop.post(SizeSet(Role.DECODE, decode))
        self._note_change()

    async def empty(self) -> None:
        """Drain and end every worker; returns when all are gone. Bounded by the drain grace."""
        self._is_emptying = True
        self.resize(0, 0)
        while self._core.num_members:
            self.changed.clear()
            await self.changed.wait()

    def kill_all(self) -> None:
        """End every worker now."""
        for handle in list(self._handles.values()):
            _kill(handle)

    def status(self) -> list[PoolStatus]:
        return self._core.status(time.monotonic())

    def _status_json(self) -> dict[str, object]:
        return {status.role.value: asdict(status) for status in self.status()}

    def _note_change(self) -> None:
        self._core.check_invariants()
        self.changed.set()

    def _perform(self, effect: PoolEffect) -> None:
        assert self._tasks is not None
        match effect:
            case StartWorker(role, worker_id):
                self._handles[worker_id] = self._create_actor(role, worker_id)
                self._tasks.create_task(self._follow(role, worker_id))
            case DrainWorker(worker_id, grace_s):
                self._report(worker_id, "draining")
                self._handles[worker_id].drain.remote(grace_s)
            case KillWorker(worker_id):
                _kill(self._handles[worker_id])

    def _create_actor(self, role: Role, worker_id: str) -> Any:
        import ray

        settings = worker_settings(self._config, role, self._num_threads)
        field = f"{role.value}_worker"
        config = self._config.model_copy(update={field: settings}).worker_config(role.value, worker_id)
        actor = ray.remote(WorkerActor).options(
            num_cpus=0,
            resources={resource_name(role): 1},
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=8,  # `wait` blocks one of them for the worker's whole life
            runtime_env={"env_vars": worker_environment(settings, has_gpu=has_gpu())},
        )
        return actor.remote(self._actor_classes[role], config.model_dump_json())

    async def _follow(self, role: Role, worker_id: str) -> None:
        """One life of a worker, from its start to its end."""
        handle = self._handles[worker_id]
        self._report(worker_id, f"starting the {role.value} worker")
        started_s = time.monotonic()
        reason = ""
        try:
            description = await handle.start.remote()
            self._report(worker_id, _ready_text(description, time.monotonic() - started_s))
            self._loop.post(WorkerReady(worker_id))
            self._note_change()
            await handle.wait.remote()
        except Exception as error:  # whatever ended a worker's process: it becomes an event with its reason
            reason = _reason(error)
        _kill(handle)
        del self._handles[worker_id]
        self._report(worker_id, f"ended: {reason}" if reason else "ended")
        self._loop.post(WorkerEnded(worker_id, reason))
        self._note_change()


def _ready_text(description: dict[str, Any], took_s: float) -> str:
    return f"ready after {took_s:.1f} s (pid {description['pid']}, {description['address']})"


def _kill(handle: Any) -> None:
    import ray

    ray.kill(handle, no_restart=True)


def _reason(error: Exception) -> str:
    """What to tell an operator: the cause inside Ray's wrapping, without its advice and stack traces."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException):
        return f"{type(cause).__name__}: {cause}"[:_MAX_REASON_CHARS]
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    detail = next((line for line in lines if "exit type" in line.lower() or "exit detail" in line.lower()), "")
    return (detail or (lines[0] if lines else type(error).__name__))[:_MAX_REASON_CHARS]
