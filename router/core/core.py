"""The router's state machine: every request's way over the workers, with all its detours. Pure: no IO.

`handle` is the only mutator. The ledger holds the state, `router/core/attempts.py` moves attempts, this module admits
requests, follows the workers and keeps the deadlines. `router/core/request_state.py` draws the states of an attempt.
Rows that are easy to miss:

* A message about an attempt that is not (or no longer) with its sender is dropped; but a TransferFailed is answered
  with Cancel, because the decode worker holds blocks for it.
* A worker that refused or failed is left alone for a while that doubles, until it takes something again.
* A retry replaces something lost; it is counted per request and for all together. A refusal is not a retry.
* A request that ends with the prefill worker's first tokens is cancelled on both workers: nobody waits for KV.
* A deadline noticed much too late means that the router stood still: then no worker is declared lost.
"""

from typing import assert_never

from common.values.errors import DeadlineExceeded, InvalidRequest, Overloaded, PdserveError
from common.values.ids import AttemptId, RequestId, WorkerRef
from common.values.messages import (
    AttemptFailed,
    Drain,
    FirstTokens,
    Granted,
    HandoffReport,
    Refused,
    Role,
    TokenBatch,
    TransferFailed,
    WorkerInfo,
    WorkerMessage,
    WorkerStats,
)
from router.core.attempts import Attempts
from router.core.dispatch import Dispatch
from router.core.events import (
    ChoiceStopped,
    Deliver,
    DrainRequested,
    DropWorker,
    EndRequested,
    PrefixFound,
    RequestSubmitted,
    RouterEffect,
    RouterEvent,
    WorkerConnected,
    WorkerLost,
    WorkerMessageReceived,
    WorkersListed,
)
from router.core.generation import Failed, GenerationRequest
from router.core.ledger import Ledger, TimerKey
from router.core.records import Record, record_of
from router.core.request_state import Choice, Phase, Request
from router.core.router_limits import RouterLimits
from router.core.workers import Worker

MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 30.0


class RouterCore:
    """Owns all requests and the picture of all workers. Readers get records and the live workers, read-only."""

    def __init__(self, limits: RouterLimits) -> None:
        self._limits = limits
        self._ledger = Ledger(limits.num_kept_requests)
        self._dispatch = Dispatch(self._ledger, limits)
        self._attempts = Attempts(self._ledger, self._dispatch, limits)
        self._num_requests = 0

    def handle(self, event: RouterEvent, now_s: float) -> list[RouterEffect]:
        match event:
            case WorkerMessageReceived(ref, message):
                self._on_worker_message(ref, message, now_s)
            case RequestSubmitted(spec, first_attempt):
                self._on_submitted(spec, first_attempt, now_s)
            case PrefixFound():
                self._dispatch.on_prefix_found(event)
            case EndRequested(request_id, error):
                self._end(request_id, error, now_s)
            case ChoiceStopped(request_id, choice_idx):
                self._on_choice_stopped(request_id, choice_idx, now_s)
            case _:
                self._on_pool_event(event, now_s)
        return self._effects(now_s)

    def handle_deadline(self, now_s: float) -> list[RouterEffect]:
        for key in self._ledger.timers.pop_expired(now_s):
            self._on_deadline(key, now_s)
        return self._effects(now_s)

    def next_deadline_s(self) -> float | None:
        return self._ledger.timers.next_s()

    def check_invariants(self) -> None:
        self._ledger.check_invariants()

    # ---- for readers --------------------------------------------------------------------------------

    @property
    def workers(self) -> tuple[Worker, ...]:
        """The connected workers; to be read only."""
        return tuple(self._ledger.pool)

    @property
    def num_queued(self) -> int:
        """Requests that no decode worker has taken yet."""
        return self._ledger.num_ungranted

    @property
    def request_ids(self) -> tuple[RequestId, ...]:
        return tuple(self._ledger.requests)

    @property
    def has_ready_pair(self) -> bool:
        return self._ledger.pool.has_ready_pair()

    def record(self, request_id: RequestId, now_s: float) -> Record | None:
        """What is known of a live or remembered request."""
        request = self._ledger.requests.get(request_id)
        return self._ledger.records.get(request_id) if request is None else record_of(request, now_s)

    def newest_records(self, limit: int, now_s: float) -> list[Record]:
        """Records of live requests, then of ended ones, newest first."""
        live = [record_of(request, now_s) for request in list(self._ledger.requests.values())[: -limit - 1 : -1]]
        return live + self._ledger.records.newest(limit - len(live))

    # ---- requests -----------------------------------------------------------------------------------

    def _on_submitted(self, spec: GenerationRequest, first_attempt: int, now_s: float) -> None:
        assert spec.request_id not in self._ledger.requests, f"request {spec.request_id} is running already"
        error = self._admission_error(spec)
        if error is not None:
            self._ledger.emit(Deliver(spec.request_id, Failed(error)))
            return
        self._num_requests += 1
        choices = [Choice(idx) for idx in range(spec.num_choices)]
        request = Request(spec, self._num_requests, now_s, choices, first_attempt)
        self._ledger.add_request(request)
        self._attempts.start(request, range(spec.num_choices), now_s)

    def _admission_error(self, spec: GenerationRequest) -> PdserveError | None:
        if not spec.token_ids:
            return InvalidRequest("the prompt is empty", param="prompt")
        for role, worker_id in ((Role.PREFILL, spec.prefill_worker_id), (Role.DECODE, spec.decode_worker_id)):
            worker = self._ledger.pool.by_id(worker_id)
            if worker_id and (worker is None or worker.info.role is not role):
                param = f"routing.{role}_worker_id"
                return InvalidRequest(f"there is no {role} worker {worker_id!r}", param=param)
        num_queued = self._ledger.num_ungranted
        if num_queued >= self._limits.max_num_queued:
            return Overloaded(f"{num_queued} requests wait already", retry_after_s=self._retry_after_s())
        return None

    def _retry_after_s(self) -> float:
        """A guess: one second for each round of running requests until the queue has drained."""
        num_running = len(self._ledger.requests) - self._ledger.num_ungranted
        return min(MAX_RETRY_AFTER_S, max(MIN_RETRY_AFTER_S, self._ledger.num_ungranted / max(1, num_running)))

    def _on_choice_stopped(self, request_id: RequestId, choice_idx: int, now_s: float) -> None:
        request = self._ledger.requests.get(request_id)
        if request is not None and not request.choices[choice_idx].has_ended:
            self._attempts.stop_choice(request, choice_idx, now_s)

    def _end(self, request_id: RequestId, error: PdserveError, now_s: float) -> None:
        request = self._ledger.requests.get(request_id)
        if request is not None:
            self._ledger.fail(request, error, now_s)

    # ---- workers ------------------------------------------------------------------------------------

    def _on_pool_event(
        self, event: WorkerConnected | WorkerLost | WorkersListed | DrainRequested, now_s: float
    ) -> None:
        self._dispatch.note_pair(now_s)
        self._ledger.may_place = True
        match event:
            case WorkerConnected(info, address):
                self._on_connected(info, address, now_s)
            case WorkerLost(ref, reason):
                self._lose(ref, reason, now_s)
            case WorkersListed(refs):
                self._ledger.pool.forget_unlisted(refs)
            case DrainRequested(worker_id, grace_s):
                self._drain(worker_id, grace_s)
            case _:
                assert_never(event)

    def _on_connected(self, info: WorkerInfo, address: str, now_s: float) -> None:
        pool = self._ledger.pool
        other = pool.by_id(info.ref.worker_id)
        if other is not None and pool.see(other.ref) > pool.see(info.ref):
            self._ledger.emit(DropWorker(info.ref, "a later life of the worker is connected", is_final=True))
            return
        pool.see(info.ref)
        if other is not None:
            self._lose(other.ref, "a later life of the worker has connected", now_s)
            is_final = other.ref != info.ref
            self._ledger.emit(DropWorker(other.ref, "a later life of the worker has connected", is_final=is_final))
        self._watch(self._ledger.pool.add(info, address, now_s))

    def _drain(self, worker_id: str, grace_s: float) -> None:
        worker = self._ledger.pool.by_id(worker_id)
        if worker is not None:
            worker.is_draining = True
            self._ledger.send(worker.ref, Drain(grace_s))

    def _lose(self, ref: WorkerRef, reason: str, now_s: float) -> None:
        worker = self._ledger.pool.remove(ref)
        if worker is None:
            return
        self._ledger.timers.discard(TimerKey("silence", ref))
        self._ledger.timers.discard(TimerKey("closed", ref))
        self._attempts.on_worker_lost(worker, reason, now_s)

    def _watch(self, worker: Worker) -> None:
        """Look again when it would have been silent for too long; messages only note the time."""
        self._ledger.timers.set(TimerKey("silence", worker.ref), worker.heard_s + self._limits.worker_silence_s)

    def _on_worker_message(self, ref: WorkerRef, message: WorkerMessage, now_s: float) -> None:
        worker = self._ledger.pool.get(ref)
        if worker is None:  # an earlier life, or one that we have given up
            return
        worker.heard_s = now_s
        match message:
            case TokenBatch(attempts):
                for attempt in attempts:
                    self._attempts.on_tokens(worker, attempt, now_s)
            case WorkerStats():
                self._dispatch.note_pair(now_s)
                worker.report(message)
                self._ledger.may_place = True
            case WorkerInfo():
                pass  # said once, at the start of the stream
            case _:
                self._on_answer(worker, message, now_s)

    def _on_answer(
        self,
        worker: Worker,
        message: Granted | Refused | FirstTokens | HandoffReport | TransferFailed | AttemptFailed,
        now_s: float,
    ) -> None:
        match message:
            case Granted():
                self._attempts.on_granted(worker, message, now_s)
            case FirstTokens():
                self._attempts.on_first_tokens(worker, message, now_s)
            case HandoffReport():
                self._attempts.on_report(worker, message)
            case Refused():
                self._attempts.on_refused(worker, message, now_s)
            case TransferFailed():
                self._attempts.on_transfer_failed(worker, message, now_s)
            case AttemptFailed():
                self._attempts.on_failed(worker, message, now_s)
            case _:
                assert_never(message)

    # ---- deadlines ----------------------------------------------------------------------------------

    def _on_deadline(self, key: TimerKey, now_s: float) -> None:
        """Several may expire together, and handling one may end what another was about."""
        match key.kind, key.of:
            case "closed", _:
                self._ledger.may_place = True
            case "silence", WorkerRef() as ref:
                self._on_silence(ref, now_s)
            case "request", str() as request_id:
                request = self._ledger.requests.get(RequestId(request_id))
                if request is not None:
                    error = DeadlineExceeded(f"not finished within {request.spec.deadline_s:g} s")
                    self._ledger.fail(request, error, now_s)
            case _, AttemptId() as attempt_id:
                self._on_attempt_deadline(key, attempt_id, now_s)

    def _on_attempt_deadline(self, key: TimerKey, attempt_id: AttemptId, now_s: float) -> None:
        found = self._ledger.find(attempt_id)
        if found is None:
            return
        if key.kind == "lookup":
            assert found[1].phase is Phase.LOOKING_UP
            self._dispatch.enqueue(*found)
        else:
            self._dispatch.on_pair_awaited(*found, now_s)

    def _on_silence(self, ref: WorkerRef, now_s: float) -> None:
        worker = self._ledger.pool.get(ref)
        if worker is None:
            return
        silence_s = now_s - worker.heard_s
        if silence_s > self._limits.worker_silence_s + self._limits.stall_s:
            worker.heard_s = now_s  # nobody could have been heard
        if now_s < worker.heard_s + self._limits.worker_silence_s:
            self._watch(worker)
            return
        self._dispatch.note_pair(now_s)
        reason = f"silent for {self._limits.worker_silence_s:g} s"
        self._lose(ref, reason, now_s)
        self._ledger.emit(DropWorker(ref, reason))

    def _effects(self, now_s: float) -> list[RouterEffect]:
        if self._ledger.may_place:
            self._dispatch.place_waiting(now_s)
        return self._ledger.take_effects()
