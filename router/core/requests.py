"""The live requests with their attempts: how each begins, moves on and ends. Pure: no IO.

Owns them, the order in which they wait, their deadlines, the retry budget and the records of ended ones. What is done
for which event is said by the tables in `router/core/transitions.py`, which act through the methods here.

One rule for every end: a worker that still has a share of the attempt is sent Cancel. Where a message says that its
sender has let go, the share is released first.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from common.cores.deadlines import Deadlines
from common.values.errors import PdserveError, WorkerFailed
from common.values.ids import AttemptId, RequestId, WorkerRef
from common.values.messages import Cancel, RouterMessage
from router.core.admission import overload_error
from router.core.events import Deliver, LookupPrefix, Lost, NoteRetry, NoteStaleHit, RouterEffect, SendToWorker
from router.core.generation import Accepted, Failed, Finished, GenerationEvent, GenerationRequest
from router.core.pool import WorkerPool
from router.core.records import RequestRecords
from router.core.request_state import AttemptPhase, Request, RouterAttempt
from router.core.retry_budget import RetryBudget
from router.core.router_limits import RouterLimits
from router.core.timings import request_timings
from router.core.waiting import Waiting
from router.core.workers import Worker

# Two losses of an attempt this close together are one death, seen from two sides.
SAME_LOSS_S = 0.5


class Requests:
    """`now_s` is the time of the event being handled; `take_effects` ends its handling."""

    def __init__(self, pool: WorkerPool, limits: RouterLimits) -> None:
        self.pool = pool
        self.limits = limits
        self.live: dict[RequestId, Request] = {}
        self.ungranted: dict[RequestId, Request] = {}  # no decode worker has taken them yet
        self.num_of_tenants: Counter[str] = Counter()  # live requests
        self.waiting = Waiting(pool, limits)
        self.records = RequestRecords(limits.num_kept_requests)
        self.timers: Deadlines[RequestId | AttemptId] = Deadlines()  # an attempt's is that of its phase
        self.now_s = 0.0
        self._budget = RetryBudget(limits.retry_burst, limits.retries_per_s)
        self._num_submitted = 0
        self._effects: list[RouterEffect] = []

    @property
    def load(self) -> tuple[int, int]:
        """Live requests, and those of them that no decode worker has taken yet."""
        return len(self.live), len(self.ungranted)

    def find(self, attempt_id: AttemptId) -> tuple[Request | None, RouterAttempt | None]:
        """A live request and its live attempt, as far as they are there."""
        request = self.live.get(attempt_id.request_id)
        return request, None if request is None else request.attempts.get(attempt_id.attempt)

    # ---- effects ------------------------------------------------------------------------------------

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

    # ---- fairness -----------------------------------------------------------------------------------

    def make_room_for(self, tenant: str) -> bool:
        """In a full queue the newest request of the tenant with most yields to one of a tenant with clearly fewer."""
        num_waiting = Counter(request.spec.tenant for request in self.ungranted.values())
        largest, num_largest = num_waiting.most_common(1)[0] if num_waiting else (tenant, 0)
        if num_largest <= num_waiting[tenant] + 1:
            return False
        theirs = (request for request in self.ungranted.values() if request.spec.tenant == largest)
        last = max(theirs, key=lambda request: (request.spec.priority, request.ordinal))
        self.fail(last, overload_error(*self.load))
        return True

    # ---- beginnings ---------------------------------------------------------------------------------

    def add(self, spec: GenerationRequest, first_attempt: int) -> None:
        self._num_submitted += 1
        request = Request(spec, self._num_submitted, self.now_s, first_attempt)
        self.live[spec.request_id] = self.ungranted[spec.request_id] = request
        self.num_of_tenants[spec.tenant] += 1
        self.timers.set(spec.request_id, request.deadline_s)
        self._start(request, range(spec.num_choices))

    def _start(self, request: Request, choices: Iterable[int]) -> None:
        """New attempts for choices that have none."""
        for attempt in request.new_attempts(choices):
            self._look_up(request, attempt)

    def _look_up(self, request: Request, attempt: RouterAttempt) -> None:
        groups = {
            key: workers
            for key, workers in self.pool.prefix_keys().items()
            if key.block_size < len(attempt.token_ids)  # shorter: no full block, or only the always computed one
        }
        if not groups or request.is_scoring:  # whoever scores a prompt computes all of it
            self.move(request, attempt, AttemptPhase.QUEUED)
            return
        attempt.lookups = set(groups)
        self.timers.set(attempt.attempt_id, self.now_s + self.limits.lookup_timeout_s)
        salt, adapter = request.spec.cache_salt, request.spec.adapter.digest
        for key, workers in groups.items():
            self.emit(LookupPrefix(attempt.attempt_id, key, attempt.token_ids, salt, adapter, workers))

    # ---- moves --------------------------------------------------------------------------------------

    def move(self, request: Request, attempt: RouterAttempt, phase: AttemptPhase) -> None:
        """The next phase: whatever the attempt waited for before, it waits for it no more."""
        self.timers.discard(attempt.attempt_id)
        self.waiting.discard(attempt)
        attempt.phase = phase
        if phase in (AttemptPhase.QUEUED, AttemptPhase.GRANTED):
            self.waiting.add(request, attempt)

    def await_prefill(self, request: Request, attempt: RouterAttempt) -> None:
        """The grant stands; another prefill worker, or the same if it is the only one, fills it."""
        attempt.prefill = None
        self.move(request, attempt, AttemptPhase.GRANTED)

    def await_pair(self, attempt: RouterAttempt, *, has_pair: bool) -> None:
        """Nothing to wait for but new workers: only for a while, counted from when there last was a pair."""
        if has_pair:
            self.timers.discard(attempt.attempt_id)
        elif attempt.attempt_id not in self.timers:
            seen_s = self.pool.pair_seen_s(self.now_s)
            self.timers.set(attempt.attempt_id, max(self.now_s, seen_s + self.limits.pair_grace_s))

    def accept(self, request: Request, prefill: Worker, decode: Worker, num_cached: int) -> None:
        """Tell the client where its request is; once, replacements are silent."""
        if not request.is_accepted:
            request.is_accepted = True
            ids = prefill.ref.worker_id, decode.ref.worker_id
            self.deliver(request, Accepted(*ids, len(request.spec.token_ids), num_cached))

    # ---- shares of workers --------------------------------------------------------------------------

    def release(self, ref: WorkerRef | None, attempt: RouterAttempt) -> None:
        """The worker has let go of the attempt, if it had it."""
        if (worker := self.holder(ref, attempt)) is not None:
            worker.release(attempt.attempt_id)
            self.waiting.wake()

    def cancel(self, ref: WorkerRef | None, attempt: RouterAttempt) -> None:
        """The worker is to let go of the attempt, if it has it."""
        if (worker := self.holder(ref, attempt)) is not None:
            self.release(ref, attempt)
            self.send(worker.ref, Cancel(attempt.attempt_id))

    def back_off(self, ref: WorkerRef | None, attempt: RouterAttempt) -> None:
        """It has no room, or failed: nothing more for it for a while. Call while it has the attempt."""
        if (worker := self.holder(ref, attempt)) is not None:
            self.pool.refused(worker, attempt.attempt_id, self.now_s)

    def refused(self, worker: Worker, request: Request, attempt: RouterAttempt) -> None:
        """It has no room for the attempt. One whose adapter finds no place holds up nobody else."""
        if adapter := request.spec.adapter.digest:
            self.pool.refused_adapter(worker, adapter, self.now_s)
        else:
            self.back_off(worker.ref, attempt)

    def check_hit(self, attempt: RouterAttempt, worker: Worker, num_cached_tokens: int) -> None:
        """Note it when the index promised more than the worker has."""
        promised = attempt.promised(worker.ref)
        if num_cached_tokens < promised:
            self.emit(NoteStaleHit(worker.ref, promised, num_cached_tokens))

    def holder(self, ref: WorkerRef | None, attempt: RouterAttempt) -> Worker | None:
        """The worker, if it has the attempt."""
        worker = self.pool.get(ref)
        return worker if worker is not None and attempt.attempt_id in worker.shares else None

    # ---- losses -------------------------------------------------------------------------------------

    def replay(self, request: Request, attempts: Sequence[RouterAttempt], reason: str) -> None:
        """The attempts are lost on their decode worker: place prompt and delivered tokens anew."""
        choices = [idx for attempt in attempts for idx in attempt.choices]
        # A decode worker's death often shows first as a failure of the prefill worker that ships to it: one retry.
        is_counted = any(self.now_s - attempt.prefill_lost_s < SAME_LOSS_S for attempt in attempts)
        if not is_counted and not self._may_retry(request, Lost.DECODE_WORKER, reason):
            return
        for attempt in attempts:
            self.end_attempt(request, attempt, reason)
        self._start(request, choices)

    def retry_prefill(self, request: Request, attempt: RouterAttempt, lost: Lost, reason: str) -> None:
        """The prefill worker has let go, or is to."""
        if attempt.early:  # the decode worker has all KV and takes no other
            self.replay(request, [attempt], reason)
        elif self._may_retry(request, lost, reason):
            attempt.prefill_lost_s = self.now_s
            self.await_prefill(request, attempt)

    def _may_retry(self, request: Request, lost: Lost, reason: str) -> bool:
        """Count a retry, or fail the request when it has had its share or all requests together have."""
        if request.num_retries >= self.limits.max_retries:
            self.fail(request, WorkerFailed(f"{reason} (after {request.num_retries} retries)"))
            return False
        if not self._budget.try_spend(self.now_s):
            self.fail(request, WorkerFailed(f"{reason} (too many retries in the cluster)"))
            return False
        request.num_retries += 1
        self.emit(NoteRetry(request.request_id, lost, reason))
        return True

    # ---- ends ---------------------------------------------------------------------------------------

    def close_if_done(self, request: Request, attempt: RouterAttempt) -> None:
        """An attempt without choices ends; a request without attempts is finished.

        Before that, a prefill worker that still has a share is waited for: what it did belongs into the account.
        """
        if attempt.choices or attempt.phase is AttemptPhase.ENDED:
            return
        if attempt.phase is AttemptPhase.DECODING and self.holder(attempt.prefill, attempt):
            self.cancel(attempt.decode, attempt)
            self.move(request, attempt, AttemptPhase.CLOSING)
            self.timers.set(attempt.attempt_id, self.now_s + self.limits.account_wait_s)
            return
        self.end_attempt(request, attempt, "finished")
        if not request.attempts:
            self.finish(request)

    def end_attempt(self, request: Request, attempt: RouterAttempt, reason: str) -> None:
        self.cancel(attempt.prefill, attempt)
        self.cancel(attempt.decode, attempt)
        self.move(request, attempt, AttemptPhase.ENDED)
        request.end_attempt(attempt, reason)
        self.waiting.wake()

    def finish(self, request: Request) -> None:
        """Every token is out: answer with what is known."""
        self._end(request, self._finished(request))

    def fail(self, request: Request, error: PdserveError) -> None:
        """Give up: cancel everywhere, answer and forget."""
        self._end(request, Failed(error))

    def _finished(self, request: Request) -> Finished:
        return Finished(
            num_prompt_tokens=len(request.spec.token_ids),
            num_completion_tokens=request.num_completion_tokens,
            num_cached_tokens=request.num_cached_tokens,
            timings=request_timings(request, self.now_s),
        )

    def _end(self, request: Request, last: Finished | Failed) -> None:
        reason = "finished" if isinstance(last, Finished) else last.error.code
        for attempt in list(request.attempts.values()):
            self.end_attempt(request, attempt, reason)
        self.ungranted.pop(request.request_id, None)
        self.timers.discard(request.request_id)
        del self.live[request.request_id]
        if self.num_of_tenants[request.spec.tenant] == 1:
            del self.num_of_tenants[request.spec.tenant]
        else:
            self.num_of_tenants[request.spec.tenant] -= 1
        self.records.keep(request, last, self.now_s)
        self.deliver(request, last)

    # ---- invariants ---------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """What must hold between two events; raises AssertionError."""
        attempts = [attempt for request in self.live.values() for attempt in request.attempts.values()]
        self.waiting.check_invariants(attempts)
        self._check_shares(attempts)
        assert list(self.ungranted.values()) == [r for r in self.live.values() if not r.is_granted]
        assert not self._effects, "effects of an event were not taken"
        for request in self.live.values():
            request.check_invariants()
            assert request.request_id in self.timers
        for key in self.timers:
            subject = self.find(key)[1] if isinstance(key, AttemptId) else self.live.get(key)
            assert subject is not None, f"timer without a subject: {key}"

    def _check_shares(self, attempts: Sequence[RouterAttempt]) -> None:
        """An attempt has a share on its decode worker, and on its prefill worker while that works, and no other.

        The prefill worker's stays until it has said what it did: for that a closing attempt waits.
        """
        decode = {(a.decode, a.attempt_id) for a in attempts if a.decode and a.phase is not AttemptPhase.CLOSING}
        working = (AttemptPhase.PREFILLING, AttemptPhase.CLOSING)
        prefill = {(a.prefill, a.attempt_id) for a in attempts if a.phase in working}
        awaited = {(a.prefill, a.attempt_id) for a in attempts if a.phase is AttemptPhase.DECODING}
        held = {(worker.ref, attempt_id) for worker in self.pool for attempt_id in worker.shares}
        assert decode | prefill <= held <= decode | prefill | awaited
