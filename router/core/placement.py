"""Applies the policy to the pool: candidates for a request, the decision, and its trace on the chosen worker.

Pure: no IO. Reads workers; `take` alone changes one.
"""

from dataclasses import dataclass

from common.values.messages import Role
from router.core import policy
from router.core.policy import Candidate, RoutingDecision
from router.core.pool import WorkerPool
from router.core.request_state import Request, RouterAttempt
from router.core.workers import Worker


@dataclass(slots=True)
class Placer:
    """Chooses workers for attempts."""

    pool: WorkerPool
    local_prefill_max_tokens: int
    balance_prefill_max_tokens: int = 0
    num_decisions: int = 0

    def choose_decode(self, request: Request, attempt: RouterAttempt, now_s: float) -> RoutingDecision:
        """A decode worker with room, that some prefill worker can pair with unless it prefills by itself."""
        candidates = tuple(
            self._decode_candidate(request, attempt, worker, now_s)
            for worker in self.pool
            if worker.info.role is Role.DECODE
        )
        return _decide(Role.DECODE, attempt, candidates, now_s)

    def choose_prefill(self, request: Request, attempt: RouterAttempt, now_s: float) -> RoutingDecision:
        """A prefill worker that pairs with the attempt's decode worker."""
        decode = self.pool.get(attempt.decode)
        assert decode is not None, f"{attempt.attempt_id} is granted by a lost worker"
        candidates = tuple(
            self._prefill_candidate(request, attempt, worker, decode, now_s)
            for worker in self.pool
            if worker.info.role is Role.PREFILL
        )
        return _decide(Role.PREFILL, attempt, candidates, now_s)

    def choose_prefiller(
        self, request: Request, attempt: RouterAttempt, decode: Worker, now_s: float
    ) -> RoutingDecision | None:
        """Who is to compute the prompt, if that may be the decode worker it goes to: the last candidate.

        None = that is settled: few tokens are missing, too many, or the client has said who.
        """
        num_missing = attempt.num_missing(decode.ref)
        is_settled = request.spec.force_colocated or request.spec.prefill_worker_id
        if is_settled or not self.local_prefill_max_tokens < num_missing <= self.balance_prefill_max_tokens:
            return None
        workers = [worker for worker in self.pool if worker.info.role is Role.PREFILL]
        num_unplaced = sum(worker.unplaced_tokens for worker in self.pool) // max(1, len(workers))
        there = [self._prefill_candidate(request, attempt, worker, decode, now_s, num_unplaced) for worker in workers]
        speed = decode.stats.prefill_tokens_per_s or max((w.stats.prefill_tokens_per_s for w in workers), default=0.0)
        here = Candidate(
            worker_id=decode.info.ref.worker_id,
            num_ranks=decode.num_ranks,
            cost=policy.prefill_cost_s(decode.tokens.value, num_missing, speed),
            load=policy.prefill_cost_s(decode.tokens.value, 0, speed),
            num_cached_tokens=attempt.promised(decode.ref),
            unknown=_unknown(decode, speed, now_s),
        )
        chosen, why = policy.choose_prefiller(there, here)
        return RoutingDecision(Role.PREFILL, attempt.attempt_id.attempt, now_s, (*there, here), chosen, why)

    def take(self, decision: RoutingDecision, now_s: float) -> Worker:
        """The chosen worker, marked as chosen."""
        assert decision.chosen is not None, "nothing was chosen"
        worker = self.pool.by_id(decision.candidates[decision.chosen].worker_id)
        assert worker is not None, "the pool changed between choosing and taking"
        self.num_decisions += 1
        worker.last_chosen = self.num_decisions
        worker.recent_placements = _recent(worker, now_s) + 1.0
        worker.recent_at_s = now_s
        return worker

    def has_pair(self, request: Request, attempt: RouterAttempt) -> bool:
        """True when the workers for the attempt's next step are there, if perhaps full."""
        if attempt.decode is not None:
            decode = self.pool.get(attempt.decode)
            return decode is not None and bool(self._partners(request, decode))
        return any(not self._mismatch(request, attempt, worker) for worker in self.pool.ready(Role.DECODE))

    def local_max(self, request: Request) -> int:
        """How many uncached tokens the decode worker may prefill by itself."""
        if request.spec.force_colocated:
            return len(request.spec.token_ids) + request.num_completion_tokens
        return self.local_prefill_max_tokens

    def _decode_candidate(self, request: Request, attempt: RouterAttempt, worker: Worker, now_s: float) -> Candidate:
        info, num_tokens = worker.info, len(attempt.token_ids)
        num_cached = attempt.promised(worker.ref)
        load = policy.decode_load(worker.blocks.value, info.num_blocks, worker.sequences.value, info.max_num_seqs)
        return Candidate(
            worker_id=info.ref.worker_id,
            num_ranks=worker.num_ranks,
            cost=policy.decode_cost(load, num_tokens - num_cached, num_tokens),
            load=load,
            num_cached_tokens=num_cached,
            recent_placements=_recent(worker, now_s),
            last_chosen=worker.last_chosen,
            refusal=self._decode_refusal(request, attempt, worker, now_s),
        )

    def _prefill_candidate(
        self,
        request: Request,
        attempt: RouterAttempt,
        worker: Worker,
        decode: Worker,
        now_s: float,
        num_unplaced: int = 0,
    ) -> Candidate:
        """`num_unplaced`: tokens that will come to the worker, and have not been placed there."""
        num_cached, num_waiting = attempt.promised(worker.ref), worker.tokens.value + num_unplaced
        num_uncached, speed = len(attempt.token_ids) - num_cached, worker.stats.prefill_tokens_per_s
        return Candidate(
            worker_id=worker.info.ref.worker_id,
            num_ranks=worker.num_ranks,
            cost=policy.prefill_cost_s(num_waiting, num_uncached, speed),
            load=policy.prefill_cost_s(num_waiting, 0, speed),
            num_cached_tokens=num_cached,
            recent_placements=_recent(worker, now_s),
            last_chosen=worker.last_chosen,
            refusal=self._prefill_refusal(request, worker, decode, now_s),
            unknown=_unknown(worker, speed, now_s),
        )

    def _decode_refusal(self, request: Request, attempt: RouterAttempt, worker: Worker, now_s: float) -> str:
        if not worker.is_ready:
            return f"is {worker.state}"
        if mismatch := self._mismatch(request, attempt, worker):
            return mismatch
        if now_s < worker.closed_until_s or not worker.takes_adapter(request.spec.adapter.digest, now_s):
            return "has refused lately"
        # An idle worker is always asked: it alone knows what fits.
        num_free = worker.info.num_blocks - worker.blocks.value
        if worker.blocks.value > 0 and attempt.num_blocks(worker.ref, worker.info.block_size) > num_free:
            return "lacks free blocks"
        return ""

    def _prefill_refusal(self, request: Request, worker: Worker, decode: Worker, now_s: float) -> str:
        if worker not in self._partners(request, decode):
            return "does not pair or is not the one asked for" if worker.is_ready else f"is {worker.state}"
        if now_s < worker.closed_until_s or not worker.takes_adapter(request.spec.adapter.digest, now_s):
            return "has refused lately"
        return ""

    def _mismatch(self, request: Request, attempt: RouterAttempt, worker: Worker) -> str:
        """Why a ready decode worker can't serve the attempt even when it has room."""
        wanted = request.spec.decode_worker_id
        if wanted and worker.info.ref.worker_id != wanted:
            return "is not the one asked for"
        if request.fingerprint not in (None, worker.info.fingerprint):
            return "has other weights than those that the answer began with"
        if attempt.num_missing(worker.ref) > self.local_max(request) and not self._partners(request, worker):
            return "has no prefill worker to pair with"
        return ""

    def _partners(self, request: Request, decode: Worker) -> list[Worker]:
        wanted = request.spec.prefill_worker_id
        return [
            worker
            for worker in self.pool.ready(Role.PREFILL)
            if worker.info.fingerprint == decode.info.fingerprint and wanted in ("", worker.info.ref.worker_id)
        ]


def _decide(role: Role, attempt: RouterAttempt, candidates: tuple[Candidate, ...], now_s: float) -> RoutingDecision:
    chosen, why = policy.choose(role, candidates)
    return RoutingDecision(role, attempt.attempt_id.attempt, now_s, candidates, chosen, why)


def _recent(worker: Worker, now_s: float) -> float:
    return policy.decayed(worker.recent_placements, now_s - worker.recent_at_s)


def _unknown(worker: Worker, tokens_per_s: float, now_s: float) -> str:
    """Why the time that a prompt would take there is a guess; empty = it is none."""
    if worker.reported_s is None:
        return "has not reported yet"
    if (age_s := now_s - worker.reported_s) > policy.MAX_REPORT_AGE_S:
        return f"has not reported for {age_s:.1f} s"
    return "" if tokens_per_s > 0 else "has not measured how fast it prefills"
