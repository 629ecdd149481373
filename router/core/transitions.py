"""The router's state machine as tables: what is done for each event in each state. Pure: no IO.

`REQUEST_ROWS` is a request's; `OWN_ROWS` an attempt's for what the router finds by itself, `DECODE_ROWS` for what the
attempt's decode worker says, `PREFILL_ROWS` for what the prefill worker of its current try says. The column "absent" is
for a sender that does not have the attempt, or no longer: messages come late and twice, and none may do harm.
docs/robustness.md shows the tables. An attempt is one placement of some of a request's choices on a decode worker:

    looking up -> queued -> reserving -> granted -> prefilling -> decoding -> ended
                    ^           |          ^  |         |            ^
                    +- refused -+          |  +- lost --+            |
                                +-------> local (prefill) -----------+

A lost decode worker ends its attempts, whatever their phase; new ones replay the prompt and what was delivered. A retry
replaces something lost; it is counted per request and for all together. A refusal is not a retry.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any

from common.cores.fair_shares import OUTPUT_WEIGHT
from common.values.errors import DeadlineExceeded, InvalidRequest, NoReadyPair, Overloaded, WorkerFailed
from common.values.messages import (
    AttemptFailed,
    AttemptTokens,
    Cancel,
    FirstTokens,
    Granted,
    HandoffReport,
    Prefill,
    PromptScored,
    Refused,
    Reserve,
    TransferFailed,
)
from common.values.request import TokenEvent
from router.core.admission import admission_error
from router.core.events import (
    AttemptTimedOut,
    ChoiceStopped,
    Deliver,
    EndRequested,
    Lost,
    NoteHandoff,
    PrefixFound,
    RequestSubmitted,
    RequestTimedOut,
    WorkerLost,
)
from router.core.generation import Failed, Tokens
from router.core.prompt_scores import is_too_early, scored
from router.core.request_state import AttemptPhase, Placed, Request, RequestState, RouterAttempt
from router.core.requests import Requests
from router.core.waiting import PrefillStart, Reservation, StillWaits


def ignore(*_: object) -> None:
    """A legal event that comes late, twice, or too late to matter."""


# ---- requests -------------------------------------------------------------------------------------------


def admit(requests: Requests, _: None, event: RequestSubmitted) -> None:
    spec = event.request
    error = admission_error(spec, requests.pool, *requests.load, requests.limits.max_num_queued)
    if error is None or (isinstance(error, Overloaded) and requests.make_room_for(spec.tenant)):
        requests.add(spec, event.first_attempt)
    else:
        requests.emit(Deliver(spec.request_id, Failed(error)))


def end(requests: Requests, request: Request, event: EndRequested) -> None:
    requests.fail(request, event.error)


def stop_choice(requests: Requests, request: Request, event: ChoiceStopped) -> None:
    """The front end has enough of one choice."""
    attempt = request.stop_choice(event.choice_idx)
    if attempt is None:
        return
    if attempt.choices:
        requests.send(attempt.decode, Cancel(attempt.attempt_id, (event.choice_idx,)))
    requests.close_if_done(request, attempt)


def time_out(requests: Requests, request: Request, _: RequestTimedOut) -> None:
    requests.fail(request, DeadlineExceeded(f"not finished within {request.spec.deadline_s:g} s"))


def finish(requests: Requests, request: Request, _: EndRequested | RequestTimedOut) -> None:
    """Nothing is missing but the account of the first tokens."""
    requests.finish(request)


# ---- what the router finds by itself --------------------------------------------------------------------


def found(requests: Requests, request: Request, attempt: RouterAttempt, event: PrefixFound) -> None:
    if event.key not in attempt.lookups:
        return
    attempt.lookups.discard(event.key)
    for worker, num_blocks in event.num_cached_blocks:
        attempt.cached_tokens[worker] = num_blocks * event.key.block_size
    if not attempt.lookups:
        requests.move(request, attempt, AttemptPhase.QUEUED)


def go_without(requests: Requests, request: Request, attempt: RouterAttempt, _: AttemptTimedOut) -> None:
    """The index does not answer."""
    requests.move(request, attempt, AttemptPhase.QUEUED)


def no_pair(requests: Requests, request: Request, attempt: RouterAttempt, _: AttemptTimedOut) -> None:
    """No worker has come."""
    if not requests.waiting.has_pair(request, attempt):
        message = "no ready prefill and decode worker that can pair"
        requests.fail(request, NoReadyPair(message, retry_after_s=requests.limits.pair_grace_s))


def close(requests: Requests, request: Request, attempt: RouterAttempt, _: AttemptTimedOut) -> None:
    """The prefill worker does not say what it did."""
    requests.cancel(attempt.prefill, attempt)
    requests.close_if_done(request, attempt)


def place_waiting(requests: Requests) -> None:
    """Give waiting attempts what there is."""
    for step in requests.waiting.steps(requests.num_of_tenants, requests.now_s):
        match step:
            case Reservation():
                _reserve(requests, step)
            case PrefillStart():
                _start_prefill(requests, step)
            case StillWaits(attempt, has_pair):
                requests.await_pair(attempt, has_pair=has_pair)


def _reserve(requests: Requests, step: Reservation) -> None:
    request, attempt, worker, now_s = step.request, step.attempt, step.worker, requests.now_s
    requests.move(request, attempt, AttemptPhase.RESERVING)
    requests.pool.try_again(worker, request.spec.adapter.digest, now_s)
    request.note_decisions(step.decisions)
    attempt.decode, attempt.fingerprint = worker.ref, worker.info.fingerprint
    num_missing = attempt.num_missing(worker.ref)
    here, there = (num_missing, 0) if num_missing <= step.local_max else (0, num_missing)
    num_blocks = attempt.num_blocks(worker.ref, worker.info.block_size)
    worker.place(attempt.attempt_id, now_s, tokens=here, blocks=num_blocks, unplaced_tokens=there)
    requests.waiting.shares.charge(request.spec.tenant, num_missing)
    requests.send(worker.ref, Reserve(request.work(attempt, now_s), step.local_max))


def _start_prefill(requests: Requests, step: PrefillStart) -> None:
    request, attempt, worker, now_s = step.request, step.attempt, step.worker, requests.now_s
    decode = requests.pool.get(attempt.decode)
    assert decode is not None, f"{attempt.attempt_id} is granted by a lost worker"
    requests.move(request, attempt, AttemptPhase.PREFILLING)
    requests.pool.try_again(worker, request.spec.adapter.digest, now_s)
    request.note_decisions((step.decision,))
    attempt.prefill, attempt.prefill_try = worker.ref, attempt.prefill_try + 1
    decode.tokens_placed(attempt.attempt_id)
    worker.place(attempt.attempt_id, now_s, tokens=attempt.num_missing(worker.ref))
    request.dispatched(attempt, now_s)
    requests.accept(request, worker, decode, attempt.promised(worker.ref))
    work, address = request.work(attempt, now_s), decode.info.handoff_address
    requests.send(worker.ref, Prefill(work, attempt.prefill_try, decode.ref, address, attempt.first_missing_token))


# ---- what the attempt's decode worker says --------------------------------------------------------------


def give_back(requests: Requests, on: Placed, message: Granted | TransferFailed) -> None:
    """It holds blocks for something that ended here, or that another stream of ours asked for."""
    requests.send(on.worker.ref, Cancel(message.attempt_id))


def grant(requests: Requests, on: Placed, message: Granted) -> None:
    if not 0 <= message.first_missing_token < len(on.attempt.token_ids):
        requests.replay(on.request, [on.attempt], f"{on.worker.ref} granted an impossible range")
        return
    on.worker.accepted(on.request.spec.adapter.digest)
    on.request.is_granted = True
    requests.ungranted.pop(on.request.request_id, None)
    requests.check_hit(on.attempt, on.worker, message.first_missing_token)
    on.attempt.first_missing_token, on.attempt.is_local = message.first_missing_token, message.is_local
    requests.waiting.wake()
    if not message.is_local:
        on.worker.tokens_computed(on.attempt.attempt_id)
        requests.await_prefill(on.request, on.attempt)
        return
    on.worker.tokens_placed(on.attempt.attempt_id)
    requests.move(on.request, on.attempt, AttemptPhase.LOCAL)
    on.request.dispatched(on.attempt, requests.now_s)
    requests.accept(on.request, on.worker, on.worker, message.first_missing_token)


def decode_refused(requests: Requests, on: Placed, message: Refused) -> None:
    if not message.is_retryable:
        requests.fail(on.request, InvalidRequest(message.reason))
        return
    requests.refused(on.worker, on.request, on.attempt)
    requests.release(on.worker.ref, on.attempt)
    renewed = on.request.renew(on.attempt)
    requests.end_attempt(on.request, on.attempt, f"refused: {message.reason}")
    requests.move(on.request, renewed, AttemptPhase.QUEUED)


def report(requests: Requests, on: Placed, message: HandoffReport) -> None:
    """All KV is in the decode worker."""
    if is_too_early(requests, on, message):
        return
    on.request.note_report(message)
    on.worker.tokens_computed(on.attempt.attempt_id)
    if on.attempt.prefill is not None and not message.is_local:
        requests.emit(NoteHandoff(on.attempt.prefill, on.worker.ref, message.num_bytes))
    _take_over(requests, on.request, on.attempt)


def late_report(_: Requests, on: Placed, message: HandoffReport) -> None:
    """Tokens were faster. A repeat counts for nothing."""
    on.request.note_report(message)
    on.worker.tokens_computed(on.attempt.attempt_id)


def decode_first(requests: Requests, on: Placed, message: AttemptTokens) -> None:
    if is_too_early(requests, on, message):
        return
    _take_over(requests, on.request, on.attempt)
    decode(requests, on, message)


def decode(requests: Requests, on: Placed, message: AttemptTokens) -> None:
    on.request.note_drafts(message)
    _deliver(requests, on.request, on.attempt, message.tokens)
    if not on.attempt.choices:
        requests.release(on.worker.ref, on.attempt)  # it has ended the choices by itself
        on.worker.reopen()
    requests.close_if_done(on.request, on.attempt)


def transfer_failed(requests: Requests, on: Placed, message: TransferFailed) -> None:
    """The prefill worker has the attempt still; the decode worker waits for another try."""
    if message.prefill_try != on.attempt.prefill_try:
        return
    requests.back_off(on.attempt.prefill, on.attempt)
    requests.cancel(on.attempt.prefill, on.attempt)
    requests.retry_prefill(on.request, on.attempt, Lost.TRANSFER, f"transfer failed: {message.reason}")


def decode_failed(requests: Requests, on: Placed, message: AttemptFailed) -> None:
    reason = f"{on.worker.ref.worker_id}: {message.reason}"
    if not message.is_retryable:
        requests.fail(on.request, WorkerFailed(reason))
        return
    requests.back_off(on.worker.ref, on.attempt)
    requests.replay(on.request, [on.attempt], reason)


def decode_lost(requests: Requests, on: Placed, event: WorkerLost) -> None:
    """All attempts that the request had there at once: one death is one retry."""
    attempts = [attempt for attempt in on.request.attempts.values() if attempt.decode == on.worker.ref]
    requests.replay(on.request, attempts, f"{on.worker.ref.worker_id} lost: {event.reason}")


def _deliver(requests: Requests, request: Request, attempt: RouterAttempt, tokens: Sequence[TokenEvent]) -> None:
    """Pass on what is new and in order; choices that have ended leave the attempt."""
    if fresh := request.take(attempt, tokens, requests.now_s):
        requests.emit(Deliver(request.request_id, Tokens(tuple(fresh))))
        requests.waiting.shares.charge(request.spec.tenant, OUTPUT_WEIGHT * len(fresh))
    if request.is_stuck(attempt):
        requests.replay(request, [attempt], "tokens are missing")


def _take_over(requests: Requests, request: Request, attempt: RouterAttempt) -> None:
    """All KV is in the decode worker, from whichever side."""
    if attempt.has_lost_a_try:  # the one that succeeded may be lost: then the current one is in vain
        requests.cancel(attempt.prefill, attempt)
    elif not request.awaits_account(attempt):
        requests.release(attempt.prefill, attempt)
    requests.move(request, attempt, AttemptPhase.DECODING)


# ---- what the prefill worker of the current try says ----------------------------------------------------


def scored_there(requests: Requests, on: Placed, message: PromptScored) -> None:
    """With the last of them, what the decode worker has said meanwhile counts."""
    scored(requests, on, message)
    decode = requests.pool.get(on.attempt.decode)
    if on.request.is_scoring or decode is None:
        return
    early, on.attempt.early = on.attempt.early, []
    for each in early:
        row = DECODE_ROWS.get((type(each), on.attempt.phase), ignore)  # the one before may have ended it
        row(requests, Placed(on.request, on.attempt, decode), each)


def first_tokens(requests: Requests, on: Placed, message: FirstTokens) -> None:
    if is_too_early(requests, on, message):
        return
    on.worker.accepted(on.request.spec.adapter.digest)
    requests.waiting.wake()
    if on.attempt.attempt_id in on.worker.shares:
        on.worker.tokens_computed(on.attempt.attempt_id)
    requests.check_hit(on.attempt, on.worker, message.num_cached_tokens)
    on.request.note_first_tokens(message)
    _deliver(requests, on.request, on.attempt, message.tokens)
    requests.close_if_done(on.request, on.attempt)  # the first may be the last: then KV is needed no more


def late_first_tokens(requests: Requests, on: Placed, message: FirstTokens) -> None:
    """The decode worker was faster. Whatever comes first, the account is the same."""
    requests.release(on.worker.ref, on.attempt)
    first_tokens(requests, on, message)


def let_go(requests: Requests, on: Placed, _: Refused | AttemptFailed | WorkerLost) -> None:
    """The decode worker has taken over: nothing is lost but the prefill worker's account, if that."""
    requests.release(on.worker.ref, on.attempt)
    requests.close_if_done(on.request, on.attempt)


def prefill_refused(requests: Requests, on: Placed, message: Refused) -> None:
    if not message.is_retryable:
        requests.fail(on.request, InvalidRequest(message.reason))
        return
    requests.refused(on.worker, on.request, on.attempt)
    requests.release(on.worker.ref, on.attempt)
    requests.await_prefill(on.request, on.attempt)


def prefill_failed(requests: Requests, on: Placed, message: AttemptFailed) -> None:
    reason = f"{on.worker.ref.worker_id}: {message.reason}"
    if not message.is_retryable:
        requests.fail(on.request, WorkerFailed(reason))
        return
    requests.back_off(on.worker.ref, on.attempt)
    requests.release(on.worker.ref, on.attempt)
    requests.retry_prefill(on.request, on.attempt, Lost.PREFILL_WORKER, reason)


def prefill_lost(requests: Requests, on: Placed, event: WorkerLost) -> None:
    reason = f"{on.worker.ref.worker_id} lost: {event.reason}"
    requests.retry_prefill(on.request, on.attempt, Lost.PREFILL_WORKER, reason)


# ---- tables ---------------------------------------------------------------------------------------------

_Table = tuple[tuple[StrEnum, ...], Mapping[type, tuple[Callable[..., None] | None, ...]]]  # None: cannot happen

# fmt: off
_REQUEST: _Table = (RequestState.ABSENT, RequestState.WAITING, RequestState.RUNNING, RequestState.CLOSING), {
    RequestSubmitted: (admit,  None,        None,        None),
    EndRequested:     (ignore, end,         end,         finish),
    ChoiceStopped:    (ignore, stop_choice, stop_choice, ignore),
    RequestTimedOut:  (ignore, time_out,    time_out,    finish),
}
_ABSENT, _LOOKING_UP, _QUEUED, _RESERVING, _GRANTED, _PREFILLING, _LOCAL, _DECODING, _CLOSING, _ = AttemptPhase
_OWN: _Table = (_ABSENT, _LOOKING_UP, _QUEUED, _RESERVING, _GRANTED, _PREFILLING, _LOCAL, _DECODING, _CLOSING), {
    PrefixFound:      (ignore, found,      ignore,  ignore,    ignore,  ignore,     ignore, ignore,   ignore),
    AttemptTimedOut:  (ignore, go_without, no_pair, None,      no_pair, None,       None,   None,     close),
}
_DECODE: _Table = (_ABSENT, _RESERVING, _GRANTED, _PREFILLING, _LOCAL, _DECODING, _CLOSING), {
    Granted:          (give_back, grant,          ignore,        ignore,          ignore,        ignore,        ignore),
    Refused:          (ignore,    decode_refused, ignore,        ignore,          ignore,        ignore,        ignore),
    HandoffReport:    (ignore,    ignore,         report,        report,          report,        late_report,   ignore),
    PromptScored:     (ignore,    ignore,         ignore,        ignore,          scored,        ignore,        ignore),
    AttemptTokens:    (ignore,    ignore,         decode_first,  decode_first,    decode_first,  decode,        ignore),
    TransferFailed:   (give_back, ignore,         ignore,        transfer_failed, ignore,        ignore,        ignore),
    AttemptFailed:    (ignore,    decode_failed,  decode_failed, decode_failed,   decode_failed, decode_failed, ignore),
    WorkerLost:       (ignore,    decode_lost,    decode_lost,   decode_lost,     decode_lost,   decode_lost,   ignore),
}
_PREFILL: _Table = (_ABSENT, _PREFILLING, _DECODING, _CLOSING), {
    PromptScored:     (ignore, scored_there,    ignore,            ignore),
    FirstTokens:      (ignore, first_tokens,    late_first_tokens, late_first_tokens),
    Refused:          (ignore, prefill_refused, let_go,            let_go),
    AttemptFailed:    (ignore, prefill_failed,  let_go,            let_go),
    WorkerLost:       (ignore, prefill_lost,    let_go,            let_go),
}
# fmt: on


def _rows(table: _Table) -> Mapping[tuple[type, Any], Callable[..., None]]:
    """(event, state) -> what is done. Public: tests cover them row by row."""
    states, rows_of = table
    cells = [(event, state, row) for event, rows in rows_of.items() for state, row in zip(states, rows, strict=True)]
    return {(event, state): row for event, state, row in cells if row is not None}


REQUEST_ROWS = _rows(_REQUEST)
OWN_ROWS = _rows(_OWN)
DECODE_ROWS = _rows(_DECODE)
PREFILL_ROWS = _rows(_PREFILL)
