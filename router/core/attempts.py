"""Moves attempts on what workers answer, and replaces what they lose. Pure: no IO.

Acts on the ledger; owns the retry budget. The states are drawn in `router/core/request_state.py`.
"""

from collections.abc import Iterable, Sequence

from common.values.errors import InvalidRequest, WorkerFailed
from common.values.ids import AttemptId
from common.values.messages import (
    AttemptFailed,
    AttemptTokens,
    Cancel,
    FirstTokens,
    Granted,
    HandoffReport,
    Refused,
    TransferFailed,
)
from common.values.request import TokenEvent
from router.core.dispatch import Dispatch
from router.core.events import Lost, NoteHandoff, NoteRetry, NoteStaleHit
from router.core.generation import Tokens
from router.core.ledger import Ledger, TimerKey
from router.core.request_state import Attempt, Phase, Request
from router.core.retry_budget import RetryBudget
from router.core.router_limits import RouterLimits
from router.core.workers import Worker

# Two losses of an attempt this close together are one death, seen from two sides.
SAME_LOSS_S = 0.5
_WITH_DECODE = frozenset({Phase.GRANTED, Phase.PREFILLING, Phase.LOCAL, Phase.DECODING})


class Attempts:
    """The life of attempts. Every method takes the time and leaves its effects in the ledger."""

    def __init__(self, ledger: Ledger, dispatch: Dispatch, limits: RouterLimits) -> None:
        self._ledger = ledger
        self._dispatch = dispatch
        self._max_retries = limits.max_retries
        self._budget = RetryBudget(limits.retry_burst, limits.retries_per_s)

    def start(self, request: Request, choices: Iterable[int], now_s: float) -> None:
        """New attempts for choices that have none."""
        for attempt in request.new_attempts(choices):
            self._dispatch.look_up(request, attempt, now_s)

    # ---- answers of decode workers ------------------------------------------------------------------

    def on_granted(self, worker: Worker, message: Granted, now_s: float) -> None:
        found = self._on_decode(worker, message.attempt_id)
        if found is None:  # it holds blocks for something that ended here, or that another stream of ours asked for
            self._ledger.send(worker.ref, Cancel(message.attempt_id))
            return
        request, attempt = found
        if attempt.phase is not Phase.RESERVING:
            return
        if not 0 <= message.first_missing_token < len(attempt.token_ids):
            self._replay(request, [attempt], f"{worker.ref} granted an impossible range", now_s)
            return
        worker.accepted()
        self._ledger.grant_request(request)
        self._check_hit(attempt, worker, message.first_missing_token)
        attempt.first_missing_token, attempt.is_local = message.first_missing_token, message.is_local
        self._ledger.may_place = True
        if message.is_local:
            worker.tokens_placed(attempt.attempt_id)
            attempt.phase = Phase.LOCAL
            request.dispatched(attempt, now_s)
            self._dispatch.accept(request, worker, worker, message.first_missing_token)
        else:
            worker.tokens_computed(attempt.attempt_id)
            attempt.phase = Phase.GRANTED
            self._ledger.granted.add(request, attempt)

    def on_report(self, worker: Worker, message: HandoffReport) -> None:
        found = self._on_decode(worker, message.attempt_id)
        if found is None or found[1].phase not in _WITH_DECODE:
            return
        request, attempt = found
        request.note_report(message)
        worker.tokens_computed(attempt.attempt_id)
        if attempt.prefill is not None and not message.is_local:
            self._ledger.emit(NoteHandoff(attempt.prefill, worker.ref, message.num_bytes))
        self._decoding(attempt)

    def on_tokens(self, worker: Worker, message: AttemptTokens, now_s: float) -> None:
        found = self._on_decode(worker, message.attempt_id)
        if found is None or found[1].phase not in _WITH_DECODE:
            return
        request, attempt = found
        self._decoding(attempt)
        self._deliver(request, attempt, message.tokens, now_s, from_decode=True)

    def on_transfer_failed(self, worker: Worker, message: TransferFailed, now_s: float) -> None:
        found = self._on_decode(worker, message.attempt_id)
        if found is None:  # it still holds blocks for something that ended here
            self._ledger.send(worker.ref, Cancel(message.attempt_id))
            return
        request, attempt = found
        if attempt.phase is Phase.PREFILLING and message.prefill_try == attempt.prefill_try:
            self._dispatch.refused(self._ledger.pool.get(attempt.prefill), attempt, now_s)
            self._retry_prefill(request, attempt, f"transfer failed: {message.reason}", now_s, cancel=True)

    def _decoding(self, attempt: Attempt) -> None:
        """All KV is in the decode worker, whoever brought it."""
        if attempt.phase is Phase.DECODING:
            return
        self._ledger.granted.discard(attempt.attempt_id)
        self._ledger.timers.discard(TimerKey("pair", attempt.attempt_id))
        # After a retry the try that succeeded may be an earlier one: then the current prefill worker works in vain.
        self._ledger.release_prefill(attempt, cancel=attempt.prefill_try > 0)
        attempt.phase = Phase.DECODING

    # ---- answers of prefill workers -----------------------------------------------------------------

    def on_first_tokens(self, worker: Worker, message: FirstTokens, now_s: float) -> None:
        found = self._on_prefill(worker, message.attempt_id, message.prefill_try)
        if found is None:
            return
        request, attempt = found
        worker.accepted()
        if attempt.attempt_id in worker.shares:
            worker.tokens_computed(attempt.attempt_id)
        self._check_hit(attempt, worker, message.num_cached_tokens)
        request.note_first_tokens(message)
        self._ledger.may_place = True
        self._deliver(request, attempt, message.tokens, now_s, from_decode=False)

    # ---- answers of either --------------------------------------------------------------------------

    def on_refused(self, worker: Worker, message: Refused, now_s: float) -> None:
        found = self._on_decode(worker, message.attempt_id)
        if found is not None and found[1].phase is Phase.RESERVING:
            self._refused_by_decode(worker, found, message, now_s)
            return
        found = self._on_prefill(worker, message.attempt_id, message.prefill_try)
        if found is None or found[1].phase is not Phase.PREFILLING:
            return
        request, attempt = found
        if not message.is_retryable:
            self._ledger.fail(request, InvalidRequest(message.reason), now_s)
            return
        self._dispatch.refused(worker, attempt, now_s)
        self._ledger.release_prefill(attempt, cancel=False)
        self._await_prefill(request, attempt)

    def on_failed(self, worker: Worker, message: AttemptFailed, now_s: float) -> None:
        on_decode = self._on_decode(worker, message.attempt_id)
        found = on_decode or self._on_prefill(worker, message.attempt_id, message.prefill_try)
        if found is None or (on_decode is None and found[1].phase is not Phase.PREFILLING):
            return
        request, attempt = found
        reason = f"{worker.ref.worker_id}: {message.reason}"
        if not message.is_retryable:
            self._ledger.fail(request, WorkerFailed(reason), now_s)
            return
        self._dispatch.refused(worker, attempt, now_s)
        if on_decode is not None:
            self._replay(request, [attempt], reason, now_s)
        else:
            self._retry_prefill(request, attempt, reason, now_s, cancel=False)

    def on_worker_lost(self, worker: Worker, reason: str, now_s: float) -> None:
        """The worker is out of the pool already: move everything it had."""
        lost: dict[str, tuple[Request, list[Attempt]]] = {}
        for attempt_id in list(worker.shares):
            found = self._ledger.find(attempt_id)
            assert found is not None, f"{worker.ref} holds a share of {attempt_id}, which is not there"
            request, attempt = found
            if attempt.decode == worker.ref:
                lost.setdefault(request.request_id, (request, []))[1].append(attempt)
            else:
                self._retry_prefill(request, attempt, f"{worker.ref.worker_id} lost: {reason}", now_s, cancel=False)
        for request, attempts in lost.values():
            self._replay(request, attempts, f"{worker.ref.worker_id} lost: {reason}", now_s)

    def stop_choice(self, request: Request, choice_idx: int, now_s: float) -> None:
        """The front end has enough of one choice."""
        request.choices[choice_idx].is_stopped = True
        attempt = next(attempt for attempt in request.attempts.values() if choice_idx in attempt.choices)
        if len(attempt.choices) > 1:
            self._ledger.send(attempt.decode, Cancel(attempt.attempt_id, (choice_idx,)))
        self._drop_ended_choices(request, attempt, now_s, from_decode=False)

    # ---- shared -------------------------------------------------------------------------------------

    def _refused_by_decode(
        self, worker: Worker, found: tuple[Request, Attempt], message: Refused, now_s: float
    ) -> None:
        request, attempt = found
        if not message.is_retryable:
            self._ledger.fail(request, InvalidRequest(message.reason), now_s)
            return
        self._dispatch.refused(worker, attempt, now_s)
        renewed = request.renew(attempt)
        self._ledger.end_attempt(request, attempt, f"refused: {message.reason}", cancel_decode=False)
        self._dispatch.enqueue(request, renewed)

    def _deliver(
        self, request: Request, attempt: Attempt, tokens: Sequence[TokenEvent], now_s: float, *, from_decode: bool
    ) -> None:
        """Pass on what is new and in order; end choices, the attempt and the request as far as they have ended."""
        live = [token for token in tokens if token.choice_idx in attempt.choices]
        fresh = [ready for token in live for ready in request.choices[token.choice_idx].accept(token)]
        if fresh:
            if request.marks.first_token_s is None:
                request.marks.first_token_s = now_s
            request.fingerprint = attempt.fingerprint
            self._ledger.deliver(request, Tokens(tuple(fresh)))
        if any(request.choices[idx].is_stuck for idx in attempt.choices):
            self._replay(request, [attempt], "tokens are missing", now_s)
        elif any(token.finish_reason is not None for token in fresh):
            self._drop_ended_choices(request, attempt, now_s, from_decode=from_decode)

    def _drop_ended_choices(self, request: Request, attempt: Attempt, now_s: float, *, from_decode: bool) -> None:
        """`from_decode`: the decode worker ended the choices itself and holds nothing for them."""
        attempt.choices = [idx for idx in attempt.choices if not request.choices[idx].has_ended]
        if not attempt.choices:
            self._ledger.end_attempt(request, attempt, "finished", cancel_decode=not from_decode)
        if request.has_ended:
            self._ledger.finish(request, now_s)

    def _replay(self, request: Request, attempts: Sequence[Attempt], reason: str, now_s: float) -> None:
        """The attempts are lost on their decode worker: place prompt and delivered tokens anew."""
        choices = [idx for attempt in attempts for idx in attempt.choices]
        # A decode worker's death often shows first as a failure of the prefill worker that ships to it: one retry.
        is_counted = any(now_s - attempt.prefill_lost_s < SAME_LOSS_S for attempt in attempts)
        if not is_counted and not self._may_retry(request, Lost.DECODE_WORKER, reason, now_s):
            return
        for attempt in attempts:
            self._ledger.end_attempt(request, attempt, reason, cancel_decode=True)
        self.start(request, choices, now_s)

    def _retry_prefill(self, request: Request, attempt: Attempt, reason: str, now_s: float, *, cancel: bool) -> None:
        """The grant stands; another prefill worker, or the same if it is the only one, fills it.

        `cancel`: only the transfer is lost, the prefill worker still has the attempt.
        """
        lost = Lost.TRANSFER if cancel else Lost.PREFILL_WORKER
        if not self._may_retry(request, lost, reason, now_s):
            return
        attempt.prefill_lost_s = now_s
        self._ledger.release_prefill(attempt, cancel=cancel)
        self._await_prefill(request, attempt)

    def _await_prefill(self, request: Request, attempt: Attempt) -> None:
        attempt.prefill, attempt.phase = None, Phase.GRANTED
        self._ledger.granted.add(request, attempt)
        self._ledger.may_place = True

    def _may_retry(self, request: Request, lost: Lost, reason: str, now_s: float) -> bool:
        """Count a retry, or fail the request when it has had its share or all requests together have."""
        if request.num_retries >= self._max_retries:
            self._ledger.fail(request, WorkerFailed(f"{reason} (after {request.num_retries} retries)"), now_s)
            return False
        if not self._budget.try_spend(now_s):
            self._ledger.fail(request, WorkerFailed(f"{reason} (too many retries in the cluster)"), now_s)
            return False
        request.num_retries += 1
        self._ledger.emit(NoteRetry(request.request_id, lost, reason))
        return True

    def _check_hit(self, attempt: Attempt, worker: Worker, num_cached_tokens: int) -> None:
        promised = attempt.promised(worker.ref)
        if num_cached_tokens < promised:
            self._ledger.emit(NoteStaleHit(worker.ref, promised, num_cached_tokens))

    def _on_decode(self, worker: Worker, attempt_id: AttemptId) -> tuple[Request, Attempt] | None:
        """The attempt, if this worker is its decode worker."""
        found = self._ledger.find(attempt_id)
        return found if found is not None and found[1].decode == worker.ref else None

    def _on_prefill(
        self, worker: Worker, attempt_id: AttemptId, prefill_try: int | None
    ) -> tuple[Request, Attempt] | None:
        """The attempt, if this worker is its prefill worker and speaks of the current try."""
        found = self._ledger.find(attempt_id)
        if found is None or found[1].prefill != worker.ref or prefill_try not in (None, found[1].prefill_try):
            return None
        return found
