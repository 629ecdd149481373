"""All connected workers: who is there, which life of each, whose silence has lasted too long. Pure: no IO.

Owns the workers and when each is to be looked at again. Knows no request.
"""

from collections.abc import Iterator
from typing import NamedTuple

from common.cores.deadlines import Deadlines
from common.values.ids import AttemptId, WorkerRef
from common.values.messages import Role, WorkerInfo, WorkerStats
from router.core.events import PrefixKey
from router.core.router_limits import RouterLimits
from router.core.workers import Worker


class _Timer(NamedTuple):
    """silence: a worker may have said nothing for too long. closed: one that refused may be asked again. Or "adapter"
    and a digest: it may be asked for that adapter again."""

    kind: str
    of: WorkerRef


class WorkerPool:
    """Connected workers by reference. A worker id has at most one life here, the one first seen last."""

    def __init__(self, limits: RouterLimits) -> None:
        self._limits = limits
        self._workers: dict[WorkerRef, Worker] = {}
        self._first_seen: dict[WorkerRef, int] = {}  # in order; of lives that may connect (again)
        self._num_seen = 0
        self._timers: Deadlines[_Timer] = Deadlines()
        self._pair_seen_s = float("-inf")

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def get(self, ref: WorkerRef | None) -> Worker | None:
        return self._workers.get(ref) if ref is not None else None

    def by_id(self, worker_id: str) -> Worker | None:
        return next((worker for worker in self if worker.info.ref.worker_id == worker_id), None)

    def ready(self, role: Role) -> list[Worker]:
        return [worker for worker in self if worker.info.role is role and worker.is_ready]

    def prefix_keys(self) -> dict[PrefixKey, tuple[WorkerRef, ...]]:
        """Ready workers by how they hash."""
        groups: dict[PrefixKey, tuple[WorkerRef, ...]] = {}
        for worker in self:
            if worker.is_ready:
                groups[worker.prefix_key] = (*groups.get(worker.prefix_key, ()), worker.ref)
        return groups

    # ---- pairs --------------------------------------------------------------------------------------

    def has_ready_pair(self) -> bool:
        """Some prefill and some decode worker could serve a request together."""
        fingerprints = {worker.info.fingerprint for worker in self.ready(Role.DECODE)}
        return any(worker.info.fingerprint in fingerprints for worker in self.ready(Role.PREFILL))

    def note_pair(self, now_s: float) -> None:
        """Call before anything that may take the last pair of workers away."""
        if self.has_ready_pair():
            self._pair_seen_s = now_s

    def note_expected(self, roles: frozenset[Role], now_s: float) -> None:
        """A worker that is being started or loads completes a pair as well: it is waited for as for one just lost."""
        if roles and all(role in roles or self.ready(role) for role in Role):
            self._pair_seen_s = now_s

    def pair_seen_s(self, now_s: float) -> float:
        """When a pair of workers was last there, or on its way."""
        self.note_pair(now_s)
        return self._pair_seen_s

    # ---- lives --------------------------------------------------------------------------------------

    def is_superseded(self, ref: WorkerRef) -> bool:
        """Whether a later life of the worker is connected. A life seen earlier is never newer, however it connects."""
        other = self.by_id(ref.worker_id)
        return other is not None and self._ordinal(other.ref) > self._ordinal(ref)

    def connect(self, info: WorkerInfo, address: str, now_s: float) -> None:
        self._ordinal(info.ref)
        worker = Worker(info, address, WorkerStats(kv_blocks_free=info.num_blocks), now_s)
        self._workers[info.ref] = worker
        self._watch(worker)

    def remove(self, ref: WorkerRef) -> Worker | None:
        self._timers.discard(_Timer("silence", ref))
        self._timers.discard(_Timer("closed", ref))
        worker = self._workers.pop(ref, None)
        for digest in worker.adapter_pauses if worker is not None else ():
            self._timers.discard(_Timer(f"adapter {digest}", ref))
        return worker

    def note_listed(self, refs: frozenset[WorkerRef]) -> None:
        """A life that no client connects to does not come back."""
        self._first_seen = {ref: at for ref, at in self._first_seen.items() if ref in refs or ref in self._workers}

    def _ordinal(self, ref: WorkerRef) -> int:
        if ref not in self._first_seen:
            self._num_seen += 1
            self._first_seen[ref] = self._num_seen
        return self._first_seen[ref]

    # ---- time ---------------------------------------------------------------------------------------

    def refused(self, worker: Worker, attempt_id: AttemptId, now_s: float) -> None:
        """It has no room, or failed: nothing more for it until its pause is over."""
        worker.refused(attempt_id, now_s)
        self._timers.set(_Timer("closed", worker.ref), worker.closed_until_s)

    def refused_adapter(self, worker: Worker, digest: str, now_s: float) -> None:
        """As `refused`, of work with an adapter: no more such work until its pause is over."""
        worker.refused_adapter(digest, now_s)
        self._timers.set(_Timer(f"adapter {digest}", worker.ref), worker.adapter_pauses[digest])

    def is_adapter_paused(self, digest: str) -> bool:
        """Some worker had no room for it, and has taken none of its work since."""
        return any(digest in worker.adapter_pauses for worker in self._workers.values())

    def try_again(self, worker: Worker, adapter: str, now_s: float) -> None:
        """Something is sent to the worker: after refusals one at a time, until it has taken something."""
        if adapter in worker.adapter_pauses:
            self.refused_adapter(worker, adapter, now_s)
        if worker.num_refusals:
            worker.close(now_s)
            self._timers.set(_Timer("closed", worker.ref), worker.closed_until_s)

    def next_deadline_s(self) -> float | None:
        return self._timers.next_s()

    def expire(self, now_s: float) -> list[WorkerRef] | None:
        """Those that have been silent for too long; None when no deadline is reached. Pauses end by themselves."""
        expired = self._timers.pop_expired(now_s)
        silent = [timer.of for timer in expired if timer.kind == "silence" and self._is_silent(timer.of, now_s)]
        return silent if expired else None

    def _is_silent(self, ref: WorkerRef, now_s: float) -> bool:
        """A deadline noticed much too late means that the router stood still: silence then proves nothing."""
        worker, limits = self._workers[ref], self._limits
        if now_s - worker.heard_s > limits.worker_silence_s + limits.stall_s:
            worker.heard_s = now_s
        if now_s >= worker.heard_s + limits.worker_silence_s:
            return True
        self._watch(worker)
        return False

    def _watch(self, worker: Worker) -> None:
        """Look again when it would have been silent for too long; messages only note the time."""
        self._timers.set(_Timer("silence", worker.ref), worker.heard_s + self._limits.worker_silence_s)

    def check_invariants(self) -> None:
        """What must hold between two events; raises AssertionError."""
        for timer in self._timers:
            assert timer.of in self._workers, f"timer without a worker: {timer}"
        for worker in self:
            shares = worker.shares.values()
            assert worker.tokens.own == sum(share.tokens for share in shares)
            assert worker.blocks.own == sum(share.blocks for share in shares)
            assert worker.unplaced_tokens == sum(share.unplaced_tokens for share in shares)
            assert worker.sequences.own == len(worker.shares)
            assert worker.info.role is Role.DECODE or worker.blocks.own == 0
