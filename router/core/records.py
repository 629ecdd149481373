"""What people ask about a request: its attempts, its routing decisions with their costs, its waterfall. Pure: no IO.

Owns the records of ended requests, of which the newest are kept; those of live ones are made when asked for.
No token ids: a record may be shown to an operator.
"""

from itertools import islice

import msgspec

from common.values.ids import RequestId
from router.core.generation import Failed, Finished
from router.core.policy import RoutingDecision
from router.core.request_state import Request, RouterAttempt
from router.core.timings import request_timings

Record = dict[str, object]
_encoder = msgspec.json.Encoder()


class RequestRecords:
    """The newest ended requests, oldest first. Kept as JSON: a thousand of them as objects cost every full garbage
    collection 4 ms (Zen 4, 2026-11), and most are never looked at."""

    def __init__(self, num_kept: int) -> None:
        self._num_kept = num_kept
        self._records: dict[RequestId, bytes] = {}

    def keep(self, request: Request, last: Finished | Failed, now_s: float) -> None:
        self._records.pop(request.request_id, None)
        self._records[request.request_id] = _encoder.encode(_made(request, now_s, last))
        while len(self._records) > self._num_kept:
            del self._records[next(iter(self._records))]

    def get(self, request_id: RequestId) -> Record | None:
        kept = self._records.get(request_id)
        return None if kept is None else _decoded(kept)

    def newest(self, limit: int) -> list[Record]:
        """At most `limit` records, newest first."""
        return [_decoded(kept) for kept in islice(reversed(self._records.values()), max(0, limit))]


def _decoded(kept: bytes) -> Record:
    return msgspec.json.decode(kept, type=Record)


def record_of(request: Request, now_s: float) -> Record:
    """A live request as JSON values."""
    record: Record = msgspec.to_builtins(_made(request, now_s, None))
    return record


def _made(request: Request, now_s: float, last: Finished | Failed | None) -> Record:
    """What msgspec can write; `last` is the request's answer when it has ended."""
    attempts = [*request.ended_attempts, *request.attempts.values()]
    timings = last.timings if isinstance(last, Finished) else request_timings(request, now_s)
    return {
        "request_id": request.request_id,
        "status": _status(last),
        "error": last.error.code if isinstance(last, Failed) else "",
        "message": last.error.message if isinstance(last, Failed) else "",
        "age_s": now_s - request.arrived_s,
        "num_choices": len(request.choices),
        "num_returned": request.spec.num_returned,
        "num_beams": request.spec.sampling.num_beams,
        "num_prompt_tokens": len(request.spec.token_ids),
        "num_completion_tokens": request.num_completion_tokens,
        "num_cached_tokens": request.num_cached_tokens,
        "num_drafts": request.num_drafts,
        "num_accepted_drafts": request.num_accepted_drafts,
        "num_retries": request.num_retries,
        "adapter": request.spec.adapter_name,
        "trace_parent": request.spec.trace_parent,
        "finish_reasons": [choice.finish_reason or "" for choice in request.choices],
        "attempts": [_attempt(attempt, request) for attempt in attempts],
        "decisions": [_decision(decision, request) for decision in request.decisions],
        "timings": timings,
    }


def _status(last: Finished | Failed | None) -> str:
    if last is None:
        return "running"
    return "finished" if isinstance(last, Finished) else "failed"


def _attempt(attempt: RouterAttempt, request: Request) -> Record:
    return {
        "attempt": attempt.attempt_id.attempt - request.first_attempt,
        "phase": attempt.phase.value,
        "end_reason": attempt.end_reason,
        "choices": list(attempt.choices),
        "num_tokens": len(attempt.token_ids),
        "decode_worker": str(attempt.decode or ""),
        "prefill_worker": str(attempt.prefill or ""),
        "prefill_try": attempt.prefill_try,
        "first_missing_token": attempt.first_missing_token,
        "is_local": attempt.is_local,
    }


def _decision(decision: RoutingDecision, request: Request) -> Record:
    chosen = decision.chosen
    return {
        "role": decision.role.value,
        "attempt": decision.attempt - request.first_attempt,
        "at_s": decision.at_s - request.arrived_s,
        "chosen": decision.candidates[chosen].worker_id if chosen is not None else "",
        "why": decision.why,
        "candidates": decision.candidates,
    }
