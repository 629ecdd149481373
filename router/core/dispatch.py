"""Finds workers for attempts: asks the index, keeps the two queues moving, waits for workers that are not there.

Acts on the ledger. Pure: no IO. Owns when a pair of workers was last there.
"""

from common.values.errors import NoReadyPair
from common.values.messages import Prefill, Reserve
from router.core.events import LookupPrefix, PrefixFound, SendToWorker
from router.core.generation import Accepted
from router.core.ledger import Ledger, TimerKey
from router.core.placement import Placement
from router.core.request_state import Attempt, Phase, Request
from router.core.router_limits import RouterLimits
from router.core.workers import Worker


class Dispatch:
    """From a new attempt to the worker that starts on it."""

    def __init__(self, ledger: Ledger, limits: RouterLimits) -> None:
        self._ledger = ledger
        self._limits = limits
        self._placement = Placement(ledger.pool, limits.local_prefill_max_tokens, limits.balance_prefill_max_tokens)
        self._pair_seen_s = float("-inf")

    # ---- look-up ------------------------------------------------------------------------------------

    def look_up(self, request: Request, attempt: Attempt, now_s: float) -> None:
        groups = {
            key: workers
            for key, workers in self._ledger.pool.prefix_keys().items()
            if key.block_size < len(attempt.token_ids)  # shorter: no full block, or only the always computed one
        }
        if not groups:
            self.enqueue(request, attempt)
            return
        attempt.lookups = set(groups)
        self._ledger.timers.set(TimerKey("lookup", attempt.attempt_id), now_s + self._limits.lookup_timeout_s)
        for key, workers in groups.items():
            lookup = LookupPrefix(attempt.attempt_id, key, attempt.token_ids, request.spec.cache_salt, workers)
            self._ledger.emit(lookup)

    def on_prefix_found(self, event: PrefixFound) -> None:
        found = self._ledger.find(event.attempt_id)
        if found is None or event.key not in found[1].lookups:
            return
        request, attempt = found
        attempt.lookups.discard(event.key)
        for worker, num_blocks in event.num_cached_blocks:
            attempt.cached_tokens[worker] = num_blocks * event.key.block_size
        if not attempt.lookups:
            self.enqueue(request, attempt)

    def enqueue(self, request: Request, attempt: Attempt) -> None:
        """The look-up is over, or nobody answers."""
        self._ledger.timers.discard(TimerKey("lookup", attempt.attempt_id))
        attempt.lookups.clear()
        attempt.phase = Phase.QUEUED
        self._ledger.queue.add(request, attempt)
        self._ledger.may_place = True

    # ---- placement ----------------------------------------------------------------------------------

    def note_pair(self, now_s: float) -> None:
        """Call before anything that may take the last pair of workers away."""
        if self._ledger.pool.has_ready_pair():
            self._pair_seen_s = now_s

    def place_waiting(self, now_s: float) -> None:
        """Give waiting attempts what there is, in order. A request that lacks room holds back those behind it."""
        self._ledger.may_place = False
        for request, attempt in self._ledger.granted:
            self._try_prefill(request, attempt, now_s)
        is_blocked = False
        for request, attempt in self._ledger.queue:
            is_pinned = bool(request.spec.decode_worker_id or request.spec.prefill_worker_id)
            if is_blocked and not is_pinned:
                continue
            is_placed = self._try_reserve(request, attempt, now_s)
            is_blocked |= not is_placed and not is_pinned and self._placement.has_pair(request, attempt)

    def on_pair_awaited(self, request: Request, attempt: Attempt, now_s: float) -> None:
        """Nobody came."""
        if self._placement.has_pair(request, attempt):
            return
        message = "no ready prefill and decode worker that can pair"
        self._ledger.fail(request, NoReadyPair(message, retry_after_s=self._limits.pair_grace_s), now_s)

    def accept(self, request: Request, prefill: Worker, decode: Worker, num_cached: int) -> None:
        """Tell the client where its request is; once, replacements are silent."""
        if not request.is_accepted:
            request.is_accepted = True
            ids = prefill.ref.worker_id, decode.ref.worker_id
            self._ledger.deliver(request, Accepted(*ids, len(request.spec.token_ids), num_cached))

    def refused(self, worker: Worker | None, attempt: Attempt, now_s: float) -> None:
        """It has no room, or failed: nothing more for it for a while. Call while it holds the attempt."""
        if worker is not None and attempt.attempt_id in worker.shares:
            worker.refused(attempt.attempt_id, now_s)
            self._ledger.timers.set(TimerKey("closed", worker.ref), worker.closed_until_s)

    def _try_reserve(self, request: Request, attempt: Attempt, now_s: float) -> bool:
        decision = self._placement.choose_decode(request, attempt, now_s)
        if decision.chosen is None:
            self._wait_for_pair(request, attempt, now_s)
            return False
        worker = self._placement.take(decision, now_s)
        self._placed(attempt, worker, now_s)
        request.note_decision(decision)
        attempt.decode, attempt.phase = worker.ref, Phase.RESERVING
        attempt.fingerprint = worker.info.fingerprint
        num_missing = self._placement.num_missing(attempt, worker)
        local_max = self._local_max(request, attempt, worker, now_s)
        here, there = (num_missing, 0) if num_missing <= local_max else (0, num_missing)
        num_blocks = self._placement.num_blocks(attempt, worker)
        worker.place(attempt.attempt_id, now_s, tokens=here, blocks=num_blocks, unplaced_tokens=there)
        self._ledger.emit(SendToWorker(worker.ref, Reserve(request.work(attempt, now_s), local_max)))
        return True

    def _local_max(self, request: Request, attempt: Attempt, decode: Worker, now_s: float) -> int:
        """How many uncached tokens the decode worker may prefill by itself: little, or what it does sooner."""
        decision = self._placement.choose_prefiller(request, attempt, decode, now_s)
        if decision is None:
            return self._placement.local_max(request)
        request.note_decision(decision)
        if decision.chosen != len(decision.candidates) - 1:
            return self._placement.local_max(request)
        return self._limits.balance_prefill_max_tokens

    def _try_prefill(self, request: Request, attempt: Attempt, now_s: float) -> None:
        decision = self._placement.choose_prefill(request, attempt, now_s)
        decode = self._ledger.pool.get(attempt.decode)
        assert decode is not None, f"{attempt.attempt_id} is granted by a lost worker"
        if decision.chosen is None:
            self._wait_for_pair(request, attempt, now_s)
            return
        worker = self._placement.take(decision, now_s)
        self._placed(attempt, worker, now_s)
        request.note_decision(decision)
        attempt.prefill, attempt.phase = worker.ref, Phase.PREFILLING
        attempt.prefill_try += 1
        decode.tokens_placed(attempt.attempt_id)
        promised = attempt.promised(worker.ref)
        worker.place(attempt.attempt_id, now_s, tokens=len(attempt.token_ids) - promised)
        request.dispatched(attempt, now_s)
        self.accept(request, worker, decode, promised)
        work, address = request.work(attempt, now_s), decode.info.handoff_address
        prefill = Prefill(work, attempt.prefill_try, decode.ref, address, attempt.first_missing_token)
        self._ledger.emit(SendToWorker(worker.ref, prefill))

    def _placed(self, attempt: Attempt, worker: Worker, now_s: float) -> None:
        self._ledger.queue.discard(attempt.attempt_id)
        self._ledger.granted.discard(attempt.attempt_id)
        self._ledger.timers.discard(TimerKey("pair", attempt.attempt_id))
        if worker.num_refusals:  # one at a time until it has taken something
            self._close(worker, now_s)

    def _wait_for_pair(self, request: Request, attempt: Attempt, now_s: float) -> None:
        """Nothing to wait for but new workers: only for a while, counted from when there last was a pair."""
        key = TimerKey("pair", attempt.attempt_id)
        if self._placement.has_pair(request, attempt):
            self._ledger.timers.discard(key)
        elif key not in self._ledger.timers:
            self.note_pair(now_s)
            self._ledger.timers.set(key, max(now_s, self._pair_seen_s + self._limits.pair_grace_s))

    def _close(self, worker: Worker, now_s: float) -> None:
        worker.close(now_s)
        self._ledger.timers.set(TimerKey("closed", worker.ref), worker.closed_until_s)
