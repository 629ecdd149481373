"""Which prompts a prefill worker takes: what is refused for good, and what for now. Pure: no IO."""

from common.engine.scheduling.scheduler import Scheduler
from common.values.ids import TransferId
from common.values.messages import Prefill, Refused
from common.worker.core import CoreState
from prefill_worker.request import PrefillRequest


def refusal(message: Prefill, state: CoreState[PrefillRequest]) -> Refused | None:
    """Why `message` is not taken; None = it may be."""
    attempt_id, prefill_try = message.work.attempt_id, message.prefill_try
    problem = _permanent_problem(message, state.scheduler)
    if problem is not None:
        return Refused(attempt_id, problem, is_retryable=False, prefill_try=prefill_try)
    problem = _passing_problem(TransferId(attempt_id, prefill_try), state)
    if problem is not None:
        return Refused(attempt_id, problem, is_retryable=True, prefill_try=prefill_try)
    return None


def _permanent_problem(message: Prefill, scheduler: Scheduler) -> str | None:
    num_tokens = len(message.work.token_ids)
    if not 0 <= message.first_missing_token < num_tokens:
        return f"first missing token {message.first_missing_token} of {num_tokens}"
    return scheduler.blocks.never_fits(num_tokens)


def _passing_problem(transfer_id: TransferId, state: CoreState[PrefillRequest]) -> str | None:
    if state.draining.is_requested:
        return "draining"
    if state.scheduler.is_full:
        return "queue full"
    if transfer_id in state.requests.ending:
        return "the same try is still ending"
    return None
