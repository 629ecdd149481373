"""Everything the router core knows, and the few ways in which it is taken apart again. Pure: no IO.

Owned by the core. The one place where an attempt or a request leaves: each exit releases what the attempt holds on
both workers, its place in a queue and its timers, so nothing can be left behind.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from common.cores.deadlines import Deadlines
from common.values.errors import PdserveError
from common.values.ids import AttemptId, RequestId, WorkerRef
from common.values.messages import Cancel, Role, RouterMessage
from router.core.attempt_queue import AttemptQueue
from router.core.events import Deliver, RouterEffect, SendToWorker
from router.core.generation import Failed, Finished, GenerationEvent
from router.core.records import RequestRecords
from router.core.request_state import Attempt, Phase, Request
from router.core.timings import request_timings
from router.core.workers import WorkerPool


class TimerKey(NamedTuple):
    """request: its deadline. lookup: the index does not answer. pair: no worker comes. silence: a worker says
    nothing. closed: a worker that refused may be asked again."""

    kind: Literal["request", "lookup", "pair", "silence", "closed"]
    of: RequestId | AttemptId | WorkerRef


class Ledger:
    """Requests, workers, queues, timers, and the effects of the event being handled."""

    def __init__(self, num_kept_requests: int) -> None:
        self.requests: dict[RequestId, Request] = {}
        self.pool = WorkerPool()
        self.queue = AttemptQueue()  # for a decode worker
        self.granted = AttemptQueue()  # have one, wait for a prefill worker
        self.timers: Deadlines[TimerKey] = Deadlines()
        self.records = RequestRecords(num_kept_requests)
        self.num_ungranted = 0  # requests that no decode worker has taken yet
        self.may_place = False  # something changed that may let a waiting attempt go on
        self._effects: list[RouterEffect] = []

    def emit(self, effect: RouterEffect) -> None:
        self._effects.append(effect)

    def take_effects(self) -> list[RouterEffect]:
        effects, self._effects = self._effects, []
        return effects

    def send(self, worker: WorkerRef | None, message: RouterMessage) -> None:
        """Send to a worker that is still connected."""
        if worker is not None and self.pool.get(worker) is not None:
            self.emit(SendToWorker(worker, message))

    def deliver(self, request: Request, event: GenerationEvent) -> None:
        self.emit(Deliver(request.request_id, event))

    def find(self, attempt_id: AttemptId) -> tuple[Request, Attempt] | None:
        """A live attempt and its request."""
        request = self.requests.get(attempt_id.request_id)
        attempt = request.attempts.get(attempt_id.attempt) if request is not None else None
        return (request, attempt) if request is not None and attempt is not None else None

    def add_request(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.num_ungranted += 1
        self.timers.set(TimerKey("request", request.request_id), request.deadline_s)

    def grant_request(self, request: Request) -> None:
        """A decode worker has taken the request for the first time."""
        if not request.is_granted:
            request.is_granted = True
            self.num_ungranted -= 1

    def release_prefill(self, attempt: Attempt, *, cancel: bool) -> None:
        """The prefill worker is not needed any more. `cancel`: it may still be at work."""
        worker = self.pool.get(attempt.prefill)
        if worker is None or attempt.attempt_id not in worker.shares:
            return
        worker.release(attempt.attempt_id)
        self.may_place = True
        if cancel:
            self.send(attempt.prefill, Cancel(attempt.attempt_id))

    def end_attempt(self, request: Request, attempt: Attempt, reason: str, *, cancel_decode: bool) -> None:
        """Take a live attempt apart. `cancel_decode`: its decode worker does not know yet."""
        self.queue.discard(attempt.attempt_id)
        self.granted.discard(attempt.attempt_id)
        self.timers.discard(TimerKey("lookup", attempt.attempt_id))
        self.timers.discard(TimerKey("pair", attempt.attempt_id))
        self.release_prefill(attempt, cancel=True)
        worker = self.pool.get(attempt.decode)
        if worker is not None:
            worker.release(attempt.attempt_id)
            if cancel_decode:
                self.send(attempt.decode, Cancel(attempt.attempt_id))
        request.end_attempt(attempt, reason)
        self.may_place = True

    def finish(self, request: Request, now_s: float) -> None:
        """All choices have ended: answer and forget."""
        finished = Finished(
            num_prompt_tokens=len(request.spec.token_ids),
            num_completion_tokens=request.num_completion_tokens,
            num_cached_tokens=request.num_cached_tokens,
            timings=request_timings(request, now_s),
        )
        self._end_request(request, finished, now_s)

    def fail(self, request: Request, error: PdserveError, now_s: float) -> None:
        """Give up: cancel everywhere, answer and forget."""
        self._end_request(request, Failed(error), now_s)

    def _end_request(self, request: Request, last: Finished | Failed, now_s: float) -> None:
        reason = "finished" if isinstance(last, Finished) else last.error.code
        for attempt in list(request.attempts.values()):
            self.end_attempt(request, attempt, reason, cancel_decode=True)
        self.grant_request(request)  # it waits no longer
        self.timers.discard(TimerKey("request", request.request_id))
        del self.requests[request.request_id]
        self.records.keep(request, last, now_s)
        self.deliver(request, last)

    # ---- invariants ---------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """What must hold between two events; raises AssertionError."""
        attempts = [(r, a) for r in self.requests.values() for a in r.attempts.values()]
        self._check_choices()
        self._check_queues(attempts)
        self._check_shares(attempts)
        assert self.num_ungranted == sum(not request.is_granted for request in self.requests.values())
        assert not self._effects, "effects of an event were not taken"
        for key in self.timers:
            assert self._has_subject(key), f"timer without a subject: {key}"

    def _check_choices(self) -> None:
        for request in self.requests.values():
            live = sorted(choice.idx for choice in request.choices if not choice.has_ended)
            placed = sorted(idx for attempt in request.attempts.values() for idx in attempt.choices)
            assert live == placed, f"{request.request_id}: choices {live} live, {placed} in attempts"
            assert live, f"{request.request_id} has ended and is still here"
            assert TimerKey("request", request.request_id) in self.timers

    def _check_queues(self, attempts: Sequence[tuple[Request, Attempt]]) -> None:
        for _, attempt in attempts:
            assert (attempt.attempt_id in self.queue) == (attempt.phase is Phase.QUEUED), attempt
            assert (attempt.attempt_id in self.granted) == (attempt.phase is Phase.GRANTED), attempt
        waiting = sum(attempt.phase in (Phase.QUEUED, Phase.GRANTED) for _, attempt in attempts)
        assert len(self.queue) + len(self.granted) == waiting, "an ended attempt still waits"

    def _check_shares(self, attempts: Sequence[tuple[Request, Attempt]]) -> None:
        """An attempt has a share on its decode worker, and on its prefill worker while that works, and no other."""
        decode = {(a.decode, a.attempt_id) for _, a in attempts if a.decode is not None}
        prefill = {(a.prefill, a.attempt_id) for _, a in attempts if a.phase is Phase.PREFILLING}
        held = {(worker.ref, attempt_id) for worker in self.pool for attempt_id in worker.shares}
        assert held == {pair for pair in decode | prefill if self.pool.get(pair[0]) is not None}
        assert all(self.pool.get(ref) is not None for ref, _ in decode | prefill), "an attempt is on a lost worker"
        for worker in self.pool:
            assert worker.tokens.own == sum(share.tokens for share in worker.shares.values())
            assert worker.blocks.own == sum(share.blocks for share in worker.shares.values())
            assert worker.unplaced_tokens == sum(share.unplaced_tokens for share in worker.shares.values())
            assert worker.sequences.own == len(worker.shares)
            assert worker.info.role is Role.DECODE or worker.blocks.own == 0

    def _has_subject(self, key: TimerKey) -> bool:
        if key.kind == "request":
            return key.of in self.requests
        if isinstance(key.of, AttemptId):
            return self.find(key.of) is not None
        return isinstance(key.of, WorkerRef) and self.pool.get(key.of) is not None
