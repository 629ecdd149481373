"""The router's state machine. Pure: no IO; `handle` and `handle_deadline` are the only mutators.

Owns the picture of all workers (`router/core/pool.py`) and all requests (`router/core/requests.py`); this module brings
each event to its table (`router/core/transitions.py`), and follows workers that come and go.
"""

from typing import Any, assert_never

from common.values.ids import AttemptId, RequestId, WorkerRef
from common.values.messages import Drain, TokenBatch, WorkerInfo, WorkerMessage, WorkerStats
from router.core.events import (
    AttemptTimedOut,
    ChoiceStopped,
    DrainRequested,
    DropWorker,
    EndRequested,
    PrefixFound,
    RequestSubmitted,
    RequestTimedOut,
    RouterEffect,
    RouterEvent,
    WorkerConnected,
    WorkerLost,
    WorkerMessageReceived,
    WorkersListed,
)
from router.core.pool import WorkerPool
from router.core.records import Record, record_of
from router.core.request_state import AttemptPhase, Placed, RequestState
from router.core.requests import Requests
from router.core.router_limits import RouterLimits
from router.core.transitions import (
    DECODE_ROWS,
    OWN_ROWS,
    PREFILL_ROWS,
    REQUEST_ROWS,
    place_waiting,
)
from router.core.workers import Worker


class RouterCore:
    """Readers get records and the live workers, read-only."""

    def __init__(self, limits: RouterLimits) -> None:
        self._pool = WorkerPool(limits)
        self._requests = Requests(self._pool, limits)

    def handle(self, event: RouterEvent, now_s: float) -> list[RouterEffect]:
        self._requests.now_s = now_s
        match event:
            case WorkerMessageReceived(ref, message):
                self._hear(ref, message, now_s)
            case RequestSubmitted():
                self._handle_request_event(event.request.request_id, event)
            case EndRequested() | ChoiceStopped():
                self._handle_request_event(event.request_id, event)
            case PrefixFound():
                self._handle_own_event(event.attempt_id, event)
            case _:
                self._handle_pool_event(event, now_s)
        return self._take_effects()

    def handle_deadline(self, now_s: float) -> list[RouterEffect]:
        """Several may be reached together, and handling one may end what another was about."""
        self._requests.now_s = now_s
        for key in self._requests.timers.pop_expired(now_s):
            if isinstance(key, AttemptId):
                self._handle_own_event(key, AttemptTimedOut(key))
            else:
                self._handle_request_event(key, RequestTimedOut(key))
        silent = self._pool.expire(now_s)
        if silent is not None:
            self._requests.waiting.wake()
            self._pool.note_pair(now_s)
        for ref in silent or ():
            reason = f"silent for {self._requests.limits.worker_silence_s:g} s"
            self._lose(WorkerLost(ref, reason))
            self._requests.emit(DropWorker(ref, reason))
        return self._take_effects()

    def next_deadline_s(self) -> float | None:
        requests_s, pool_s = self._requests.timers.next_s(), self._pool.next_deadline_s()
        return pool_s if requests_s is None or (pool_s is not None and pool_s < requests_s) else requests_s

    def check_invariants(self) -> None:
        self._pool.check_invariants()
        self._requests.check_invariants()

    # ---- for readers --------------------------------------------------------------------------------

    @property
    def workers(self) -> tuple[Worker, ...]:
        """The connected workers; to be read only."""
        return tuple(self._pool)

    @property
    def num_queued(self) -> int:
        """Requests that no decode worker has taken yet."""
        return len(self._requests.ungranted)

    @property
    def request_ids(self) -> tuple[RequestId, ...]:
        return tuple(self._requests.live)

    @property
    def has_ready_pair(self) -> bool:
        return self._pool.has_ready_pair()

    def record(self, request_id: RequestId, now_s: float) -> Record | None:
        """What is known of a live or remembered request."""
        request = self._requests.live.get(request_id)
        return self._requests.records.get(request_id) if request is None else record_of(request, now_s)

    def newest_records(self, limit: int, now_s: float) -> list[Record]:
        """Records of live requests, then of ended ones, newest first."""
        newest = list(self._requests.live.values())[: -limit - 1 : -1]
        live = [record_of(request, now_s) for request in newest]
        return live + self._requests.records.newest(limit - len(live))

    # ---- requests and attempts ----------------------------------------------------------------------

    def _handle_request_event(self, request_id: RequestId, event: Any) -> None:
        request = self._requests.live.get(request_id)
        state = RequestState.ABSENT if request is None else request.state
        row = REQUEST_ROWS.get((type(event), state))
        assert row is not None, f"{request_id}: {type(event).__name__} while {state}"
        row(self._requests, request, event)

    def _handle_own_event(self, attempt_id: AttemptId, event: PrefixFound | AttemptTimedOut) -> None:
        request, attempt = self._requests.find(attempt_id)
        phase = AttemptPhase.ABSENT if attempt is None else attempt.phase
        OWN_ROWS[type(event), phase](self._requests, request, attempt, event)

    def _hear_of_attempt(self, worker: Worker, attempt_id: AttemptId, message: Any) -> None:
        """What a worker says of an attempt, or that it is lost."""
        request: Any
        attempt: Any
        request, attempt = self._requests.find(attempt_id)
        phase = AttemptPhase.ABSENT
        if attempt is not None and attempt.is_on(worker, getattr(message, "prefill_try", None)):
            phase = attempt.phase
        rows = DECODE_ROWS if worker.is_decode else PREFILL_ROWS
        if row := rows.get((type(message), phase)):  # what only the other role says has none
            row(self._requests, Placed(request, attempt, worker), message)

    # ---- workers ------------------------------------------------------------------------------------

    def _hear(self, ref: WorkerRef, message: WorkerMessage, now_s: float) -> None:
        worker = self._pool.get(ref)
        if worker is None:  # an earlier life, or one that we have given up
            return
        worker.heard_s = now_s
        match message:
            case TokenBatch(attempts):
                for tokens in attempts:
                    self._hear_of_attempt(worker, tokens.attempt_id, tokens)
            case WorkerStats():
                self._pool.note_pair(now_s)
                worker.report(message, now_s)
                self._requests.waiting.wake()
            case WorkerInfo():
                pass  # said once, at the start of the stream
            case _:
                self._hear_of_attempt(worker, message.attempt_id, message)

    def _handle_pool_event(
        self, event: WorkerConnected | WorkerLost | WorkersListed | DrainRequested, now_s: float
    ) -> None:
        self._pool.note_pair(now_s)
        self._requests.waiting.wake()
        match event:
            case WorkerConnected(info, address):
                self._connect(info, address, now_s)
            case WorkerLost():
                self._lose(event)
            case WorkersListed(refs, expected):
                self._pool.note_listed(refs)
                self._pool.note_expected(expected, now_s)
            case DrainRequested(worker_id, grace_s):
                self._drain(worker_id, grace_s)
            case _:
                assert_never(event)

    def _connect(self, info: WorkerInfo, address: str, now_s: float) -> None:
        if self._pool.is_superseded(info.ref):
            self._requests.emit(DropWorker(info.ref, "a later life of the worker is connected", is_final=True))
            return
        if (other := self._pool.by_id(info.ref.worker_id)) is not None:
            reason = "a later life of the worker has connected"
            self._lose(WorkerLost(other.ref, reason))
            self._requests.emit(DropWorker(other.ref, reason, is_final=other.ref != info.ref))
        self._pool.connect(info, address, now_s)

    def _drain(self, worker_id: str, grace_s: float) -> None:
        worker = self._pool.by_id(worker_id)
        if worker is not None:
            worker.is_draining = True
            self._requests.send(worker.ref, Drain(grace_s))

    def _lose(self, event: WorkerLost) -> None:
        """Everything that the worker had moves; it is out of the pool before any of it is placed."""
        worker = self._pool.remove(event.worker)
        if worker is not None:
            for attempt_id in worker.shares:
                self._hear_of_attempt(worker, attempt_id, event)

    def _take_effects(self) -> list[RouterEffect]:
        if self._requests.waiting.is_awake:
            place_waiting(self._requests)
        return self._requests.take_effects()
