"""The prefill worker's decisions: from a Prefill message to first tokens and shipped KV. Pure: no IO, no clock.

Owns the requests (states in `request.py`), their deadlines and the drain; the scheduler it drives owns the queue and
the blocks, the sender core inside it owns the transfers. One step runs at a time; what became possible during an
event is scheduled at its end. A request that fails never takes others along, except by a step that fails as a whole.

Late and duplicate messages: a Prefill that is not newer than the attempt's current try, a Cancel of something unknown
and network events of ended transfers are ignored. A local event out of place raises InvalidTransition.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence

from common.cores.core_loop import Core
from common.cores.deadlines import Deadlines, earliest
from common.cores.draining import Draining
from common.engine.contract.plan import StepResult
from common.engine.kv.block_pool import BlockPool
from common.engine.scheduling.step_rate import StepRate
from common.values.errors import InvalidTransition
from common.values.hashing import block_hashes, hash_root
from common.values.ids import AttemptId, RouterId, TransferId
from common.values.messages import (
    AttemptFailed,
    BlockHolder,
    Cancel,
    FirstTokens,
    Prefill,
    Refused,
    WorkerState,
    WorkerStats,
)
from common.values.request import ChunkTiming, SampledToken, TokenEvent
from kvtransfer.events import (
    FirstToken,
    FirstTokensSampled,
    Outcome,
    SenderEffect,
    SenderEvent,
    TokensComputed,
    TransferCancelRequested,
    TransferEnded,
    TransferStarted,
)
from prefill_worker.block_holders import holders_of
from prefill_worker.events import (
    Drained,
    DrainRequested,
    LayerComputed,
    MessageReceived,
    PrefillEffect,
    PrefillEvent,
    PublishBlocks,
    RouterLost,
    RunStep,
    SendToRouter,
    StepFailed,
    StepFinished,
)
from prefill_worker.invariants import check_requests
from prefill_worker.request import Phase, PrefillRequest
from prefill_worker.scheduler import PrefillLimits, PrefillScheduler

__all__ = ["PrefillCore", "PrefillLimits"]


class PrefillCore:
    """`handle` is the only mutator, `handle_deadline` its sibling for the passing of time."""

    def __init__(
        self,
        pool: BlockPool,
        sender: Core[SenderEvent, SenderEffect],
        limits: PrefillLimits,
        hash_fields: Mapping[str, str],
        num_layers: int,
    ) -> None:
        self._pool = pool
        self._sender = sender
        self._scheduler = PrefillScheduler(pool, limits)
        self._hash_fields = dict(hash_fields)
        self._num_layers = num_layers
        self._requests: dict[TransferId, PrefillRequest] = {}
        self._current: dict[AttemptId, PrefillRequest] = {}  # the try that counts; never an ENDING one
        self._deadlines: Deadlines[TransferId] = Deadlines()
        self._num_sequences = 0
        self._num_layers_done, self._step_started_s = 0, 0.0  # of the running step
        self._rate = StepRate()
        self._draining = Draining()
        self._effects: list[PrefillEffect] = []
        self._history: deque[str] = deque(maxlen=32)

    def handle(self, event: PrefillEvent, now_s: float) -> list[PrefillEffect]:
        self._history.append(f"{now_s:.3f} {type(event).__name__}")
        match event:
            case MessageReceived(router_id, Prefill() as message):
                self._on_prefill(router_id, message, now_s)
            case MessageReceived(_, Cancel() as message):
                self._on_cancel(message, now_s)
            case MessageReceived():
                raise InvalidTransition(f"not a message for a prefill worker: {type(event.message).__name__}")
            case RouterLost(router_id):
                self._on_router_lost(router_id, now_s)
            case LayerComputed(step_id, num_layers):
                self._on_layer_computed(step_id, num_layers, now_s)
            case StepFinished(result):
                self._on_step_finished(result, now_s)
            case StepFailed(step_id, reason):
                self._on_step_failed(step_id, reason, now_s)
            case DrainRequested(grace_s):
                self._draining.request(now_s + grace_s)
            case _:
                self._tell_sender(event, now_s)
        return self._conclude(now_s)

    def handle_deadline(self, now_s: float) -> list[PrefillEffect]:
        self._history.append(f"{now_s:.3f} deadline")
        for transfer_id in self._deadlines.pop_expired(now_s):
            self._fail(self._requests[transfer_id], "deadline", now_s, is_retryable=False)
        self._take_sender_effects(self._sender.handle_deadline(now_s), now_s)
        if self._draining.is_due(now_s):
            self._end_drain(now_s)
        return self._conclude(now_s)

    def next_deadline_s(self) -> float | None:
        return earliest(self._deadlines.next_s(), self._sender.next_deadline_s(), self._draining.next_s())

    def stats(self, now_s: float) -> WorkerStats:
        """What routers are told; reads only."""
        pool = self._pool.stats()
        phases = Counter(request.phase for request in self._requests.values())
        return WorkerStats(
            state=WorkerState.DRAINING if self._draining.is_requested else WorkerState.READY,
            num_running=phases[Phase.RUNNING],
            num_waiting=phases[Phase.WAITING],
            num_waiting_uncached_tokens=sum(request.num_remaining for request in self._scheduler.queued),
            kv_blocks_used=pool.used,
            kv_blocks_cached=pool.cached,
            kv_blocks_free=pool.free,
            kv_blocks_held=pool.held,
            prefill_tokens_per_s=self._rate.tokens_per_s,
            step_s=self._rate.step_s,
            num_held_attempts=phases[Phase.COMPUTED],
        )

    def holders(self, now_s: float) -> list[BlockHolder]:
        """Who holds blocks, for an audit; reads only."""
        return holders_of(self._requests.values(), now_s)

    # ---- messages -----------------------------------------------------------------------------------

    def _on_prefill(self, router_id: RouterId, message: Prefill, now_s: float) -> None:
        attempt_id = message.work.attempt_id
        current = self._current.get(attempt_id)
        if current is not None and current.message.prefill_try >= message.prefill_try:
            return
        if current is not None:
            self._end(current, "superseded by a newer try", now_s)
        refused = self._refusal(message)
        if refused is not None:
            self._effects.append(SendToRouter(router_id, refused))
            return
        self._num_sequences += 1
        request = self._new_request(router_id, message, now_s)
        self._requests[request.transfer_id] = request
        self._current[attempt_id] = request
        self._deadlines.set(request.transfer_id, request.deadline_s)
        self._scheduler.add(request)

    def _refusal(self, message: Prefill) -> Refused | None:
        attempt_id, prefill_try = message.work.attempt_id, message.prefill_try
        problem = self._permanent_problem(message)
        if problem is not None:
            return Refused(attempt_id, problem, is_retryable=False, prefill_try=prefill_try)
        problem = self._passing_problem(TransferId(attempt_id, prefill_try))
        if problem is not None:
            return Refused(attempt_id, problem, is_retryable=True, prefill_try=prefill_try)
        return None

    def _permanent_problem(self, message: Prefill) -> str | None:
        num_tokens = len(message.work.token_ids)
        if not 0 <= message.first_missing_token < num_tokens:
            return f"first missing token {message.first_missing_token} of {num_tokens}"
        if not self._scheduler.can_ever_fit(num_tokens):
            return f"{num_tokens} tokens never fit in {self._pool.num_blocks * self._pool.block_size}"
        return None

    def _passing_problem(self, transfer_id: TransferId) -> str | None:
        if self._draining.is_requested:
            return "draining"
        if self._scheduler.is_full:
            return "queue full"
        if transfer_id in self._requests:
            return "the same try is still ending"
        return None

    def _new_request(self, router_id: RouterId, message: Prefill, now_s: float) -> PrefillRequest:
        work, block_size = message.work, self._pool.block_size
        root = hash_root(self._hash_fields, block_size, work.cache_salt)
        return PrefillRequest(
            message=message,
            router_id=router_id,
            sequence_id=self._num_sequences,
            arrived_s=now_s,
            deadline_s=now_s + work.deadline_s,
            hashes=block_hashes(work.token_ids, block_size, root),
        )

    def _on_cancel(self, message: Cancel, now_s: float) -> None:
        """One pass computes all choices: only when none is wanted any more there is something to save."""
        request = self._current.get(message.attempt_id)
        if request is None:
            return
        request.cancelled_choices.update(message.choices or request.work.choices)
        if request.cancelled_choices.issuperset(request.work.choices):
            self._end(request, "cancelled", now_s)

    def _on_router_lost(self, router_id: RouterId, now_s: float) -> None:
        for request in list(self._current.values()):
            if request.router_id == router_id:
                self._end(request, "router lost", now_s)

    # ---- steps --------------------------------------------------------------------------------------

    def _on_layer_computed(self, step_id: int, num_layers: int, now_s: float) -> None:
        self._check_step(step_id)
        self._num_layers_done = num_layers
        for request in self._scheduler.in_step:
            if request.phase is Phase.RUNNING:
                token_end = request.num_computed + request.num_scheduled
                self._tell_sender(TokensComputed(request.transfer_id, num_layers, token_end), now_s)

    def _on_step_finished(self, result: StepResult, now_s: float) -> None:
        if self._num_layers_done < self._num_layers:
            self._on_layer_computed(result.step_id, self._num_layers, now_s)
        self._check_step(result.step_id)
        results = {row.sequence_id: row for row in result.results}
        errors = {row.sequence_id: row.error for row in result.results if row.error is not None}
        finished = self._scheduler.finish_step(set(errors))
        self._rate.add(sum(num_tokens for _, num_tokens in finished), result.duration_s)
        for request, num_tokens in finished:
            start_s, end_s = self._step_started_s - request.arrived_s, now_s - request.arrived_s
            request.chunks.append(ChunkTiming(start_s, end_s, num_tokens))
            if request.phase is Phase.ENDING:
                self._release_if_idle(request)
            elif request.sequence_id in errors:
                self._fail(request, errors[request.sequence_id], now_s, is_retryable=False)
            elif request.num_remaining == 0:
                self._complete(request, results[request.sequence_id].tokens, now_s)

    def _on_step_failed(self, step_id: int, reason: str, now_s: float) -> None:
        """Every request of the step fails here; the router may try it elsewhere, a bounded number of times."""
        self._check_step(step_id)
        for request in self._scheduler.fail_step():
            if request.phase is Phase.ENDING:
                self._release_if_idle(request)
            else:
                self._fail(request, f"step failed: {reason}", now_s, is_retryable=True)

    def _complete(self, request: PrefillRequest, tokens: tuple[SampledToken, ...], now_s: float) -> None:
        """RUNNING -> COMPUTED: first tokens go out at once; the blocks stay for what is still to be shipped."""
        work = request.work
        assert request.started_s is not None
        assert len(tokens) == len(work.choices), f"{len(tokens)} tokens for {len(work.choices)} choices"
        request.phase = Phase.COMPUTED
        self._scheduler.remove(request)
        self._scheduler.hold_blocks(request)
        position = work.num_output_tokens
        first_tokens = FirstTokens(
            work.attempt_id,
            request.message.prefill_try,
            tuple(
                TokenEvent(choice, position, token, work.sampling.finish_reason(token.token_id, position + 1))
                for choice, token in zip(work.choices, tokens, strict=True)
            ),
            queue_s=request.started_s - request.arrived_s,
            prefill_s=now_s - request.started_s,
            num_cached_tokens=request.num_cached_tokens,
            chunks=tuple(request.chunks),
        )
        self._effects.append(SendToRouter(request.router_id, first_tokens))
        sampled = tuple(FirstToken(choice, token) for choice, token in zip(work.choices, tokens, strict=True))
        self._tell_sender(FirstTokensSampled(request.transfer_id, sampled), now_s)

    def _start_step(self, now_s: float) -> None:
        plan = self._scheduler.schedule()
        if plan is None:
            return
        self._step_started_s = now_s
        self._num_layers_done = 0
        for request in self._scheduler.in_step:
            if request.started_s is None:
                self._start_transfer(request, now_s)
        is_transferring = any(request.is_transferring for request in self._scheduler.in_step)
        self._effects.append(RunStep(plan, reports_layers=is_transferring))

    def _check_step(self, step_id: int) -> None:
        if step_id != self._scheduler.step_id:
            raise self._invalid(f"event of step {step_id}, running is {self._scheduler.step_id}")

    # ---- transfers ----------------------------------------------------------------------------------

    def _start_transfer(self, request: PrefillRequest, now_s: float) -> None:
        """The request got its blocks: the sender may connect, and ship what was cached."""
        request.started_s = now_s
        request.is_transferring = True
        message = request.message
        started = TransferStarted(
            transfer_id=request.transfer_id,
            peer=message.decode_worker,
            address=message.decode_address,
            first_token=message.first_missing_token,
            num_tokens=request.num_tokens,
            block_table=request.block_table,
            deadline_s=request.deadline_s,
        )
        self._tell_sender(started, now_s)
        if request.num_cached_tokens > message.first_missing_token and request.is_transferring:
            computed = TokensComputed(request.transfer_id, self._num_layers, request.num_cached_tokens)
            self._tell_sender(computed, now_s)

    def _tell_sender(self, event: SenderEvent, now_s: float) -> None:
        self._take_sender_effects(self._sender.handle(event, now_s), now_s)

    def _take_sender_effects(self, effects: Sequence[SenderEffect], now_s: float) -> None:
        for effect in effects:
            if isinstance(effect, TransferEnded):
                self._on_transfer_ended(effect, now_s)
            else:
                self._effects.append(effect)

    def _on_transfer_ended(self, ended: TransferEnded, now_s: float) -> None:
        """Nothing touches the blocks for the transfer any more. The decode worker may not know of a lost link."""
        request = self._requests.get(ended.transfer_id)
        if request is None or not request.is_transferring:
            raise self._invalid(f"end of unknown transfer {ended.transfer_id}")
        request.is_transferring = False
        reason = f"transfer: {ended.outcome} {ended.reason}".rstrip()
        if request.phase is Phase.RUNNING:
            assert ended.outcome is not Outcome.DONE, f"{request} was transferred before it was computed"
            self._fail(request, reason, now_s, is_retryable=True)
            return
        if request.phase is Phase.COMPUTED and ended.outcome is Outcome.LINK_LOST:
            failed = AttemptFailed(request.work.attempt_id, reason, True, request.message.prefill_try)
            self._effects.append(SendToRouter(request.router_id, failed))
        self._release_if_idle(request)

    # ---- ends ---------------------------------------------------------------------------------------

    def _fail(self, request: PrefillRequest, reason: str, now_s: float, *, is_retryable: bool) -> None:
        """End a request and say so, unless the router already has what it asked for."""
        if request.phase is not Phase.COMPUTED:
            failed = AttemptFailed(request.work.attempt_id, reason, is_retryable, request.message.prefill_try)
            self._effects.append(SendToRouter(request.router_id, failed))
        self._end(request, reason, now_s)

    def _end(self, request: PrefillRequest, reason: str, now_s: float) -> None:
        """Any live phase -> ENDING, or gone at once when neither a step nor a transfer touches the blocks."""
        assert request.phase is not Phase.ENDING, f"end of {request}"
        request.phase = Phase.ENDING
        self._scheduler.remove(request)
        self._deadlines.discard(request.transfer_id)
        del self._current[request.work.attempt_id]
        if request.is_transferring:
            self._tell_sender(TransferCancelRequested(request.transfer_id, reason), now_s)
        self._release_if_idle(request)

    def _release_if_idle(self, request: PrefillRequest) -> None:
        if self._requests.get(request.transfer_id) is not request:
            return
        if request.num_scheduled == 0:
            self._scheduler.hold_blocks(request)
        if request.is_busy:
            return
        self._scheduler.release_blocks(request)
        self._deadlines.discard(request.transfer_id)
        del self._requests[request.transfer_id]
        if self._current.get(request.work.attempt_id) is request:
            del self._current[request.work.attempt_id]

    def _end_drain(self, now_s: float) -> None:
        for request in list(self._current.values()):
            self._fail(request, "draining", now_s, is_retryable=True)
        if self._draining.ends(is_idle=True):
            self._effects.append(Drained())

    def _conclude(self, now_s: float) -> list[PrefillEffect]:
        """Use what the event made possible, then hand out everything decided."""
        if self._scheduler.step_id is None:
            self._start_step(now_s)
        if self._draining.ends(is_idle=not self._requests):
            self._effects.append(Drained())
        stored, evicted = self._pool.take_index_changes()
        if stored or evicted:
            self._effects.append(PublishBlocks(stored, evicted))
        effects, self._effects = self._effects, []
        return effects

    def check_invariants(self) -> None:
        self._pool.check_invariants()
        self._sender.check_invariants()
        check_requests(self._pool, self._scheduler, self._requests, self._current)
        assert len(self._deadlines) == len(self._current)
        assert not self._effects

    def _invalid(self, problem: str) -> InvalidTransition:
        return InvalidTransition(f"{problem}; history: {', '.join(self._history)}")
