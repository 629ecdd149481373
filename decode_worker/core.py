"""The decode worker's decisions: from a reservation to the last token of every choice. Pure: no IO, no clock.

Owns the attempts (states in `attempt.py`), their deadlines and the drain. The scheduler it drives owns the sequences
and their blocks, the receiver core inside it owns the transfers. One step runs at a time; what became possible during
an event is scheduled at its end, so sequences join and leave at every step.

Failures: a row that is not finite fails its attempt for good. A step that raises fails every attempt in it, retryable:
the router places them again, a bounded number of times, so a poisonous one cannot loop here. A failed transfer leaves
the grant standing. Late and duplicate messages (a Reserve of an attempt that is here, a Cancel of an unknown one,
network events of ended transfers) are ignored; a local event out of place raises InvalidTransition.
"""

from collections import deque
from collections.abc import Mapping, Sequence

from common.cores.core_loop import Core
from common.cores.deadlines import Deadlines, earliest
from common.cores.draining import Draining
from common.engine.contract.plan import SequenceResult, StepResult
from common.engine.kv.block_pool import BlockPool, RefKind
from common.values.errors import InvalidTransition
from common.values.ids import AttemptId, RouterId
from common.values.messages import (
    AttemptFailed,
    BlockHolder,
    Cancel,
    Granted,
    Refused,
    Reserve,
    TransferFailed,
    WorkerStats,
)
from decode_worker.admission import Admission
from decode_worker.attempt import Attempt, AttemptPhase
from decode_worker.block_holders import holders_of
from decode_worker.events import (
    DecodeEffect,
    DecodeEvent,
    Drained,
    DrainRequested,
    MessageReceived,
    PublishBlocks,
    RouterLost,
    RunStep,
    SendToRouter,
    StepFailed,
    StepFinished,
)
from decode_worker.generation import Generation
from decode_worker.invariants import check_attempts
from decode_worker.outbox import Outbox
from decode_worker.scheduler import DecodeLimits, DecodeScheduler
from decode_worker.sequence import Sequence as DecodeSequence
from decode_worker.sequence import SequencePhase
from decode_worker.stats import worker_stats
from kvtransfer.events import (
    AttemptReleased,
    ChunkAnnounced,
    ChunkReceived,
    ChunkWritten,
    ExpectationWithdrawn,
    FinishAnnounced,
    ReceiverEffect,
    ReceiverEvent,
    TransferExpected,
    TransferFailedLocally,
    TransferReceived,
)

__all__ = ["DecodeCore", "DecodeLimits"]

_TransferActivity = ChunkAnnounced | ChunkReceived | ChunkWritten | FinishAnnounced


class DecodeCore:
    """`handle` is the only mutator, `handle_deadline` its sibling for the passing of time."""

    def __init__(
        self,
        pool: BlockPool,
        receiver: Core[ReceiverEvent, ReceiverEffect],
        limits: DecodeLimits,
        hash_fields: Mapping[str, str],
    ) -> None:
        self._pool = pool
        self._receiver = receiver
        self._reservation_timeout_s = limits.reservation_timeout_s
        self._scheduler = DecodeScheduler(pool, limits)
        self._admission = Admission(pool, self._scheduler, limits, hash_fields)
        self._generation = Generation(self._scheduler)
        self._outbox = Outbox()
        self._attempts: dict[AttemptId, Attempt] = {}
        self._unstarted: list[Attempt] = []  # READY and in no step yet
        self._deadlines: Deadlines[AttemptId] = Deadlines()
        self._num_attempts = 0
        self._draining = Draining()
        self._effects: list[DecodeEffect] = []
        self._history: deque[str] = deque(maxlen=32)

    def handle(self, event: DecodeEvent, now_s: float) -> list[DecodeEffect]:
        self._history.append(f"{now_s:.3f} {type(event).__name__}")
        match event:
            case MessageReceived(router_id, Reserve() as message):
                self._on_reserve(router_id, message, now_s)
            case MessageReceived(_, Cancel() as message):
                self._on_cancel(message, now_s)
            case MessageReceived():
                raise self._invalid(f"not a message for a decode worker: {type(event.message).__name__}")
            case RouterLost(router_id):
                self._on_router_lost(router_id, now_s)
            case StepFinished(result):
                self._on_step_finished(result, now_s)
            case StepFailed(step_id, reason):
                self._on_step_failed(step_id, reason, now_s)
            case DrainRequested(grace_s):
                self._draining.request(now_s + grace_s)
            case _:
                self._note_activity(event, now_s)
                self._tell_receiver(event, now_s)
        return self._conclude(now_s)

    def handle_deadline(self, now_s: float) -> list[DecodeEffect]:
        self._history.append(f"{now_s:.3f} deadline")
        for attempt_id in self._deadlines.pop_expired(now_s):
            self._on_expired(self._attempts[attempt_id], now_s)
        self._take_receiver_effects(self._receiver.handle_deadline(now_s), now_s)
        if self._draining.is_due(now_s):
            self._end_drain(now_s)
        return self._conclude(now_s)

    def next_deadline_s(self) -> float | None:
        return earliest(self._deadlines.next_s(), self._receiver.next_deadline_s(), self._draining.next_s())

    def stats(self, now_s: float) -> WorkerStats:
        """What routers are told; reads only."""
        num_held = sum(attempt.phase is AttemptPhase.RESERVED for attempt in self._attempts.values())
        is_draining = self._draining.is_requested
        return worker_stats(self._pool.stats(), self._scheduler, num_held, is_draining=is_draining)

    def holders(self, now_s: float) -> list[BlockHolder]:
        """Who holds blocks, for an audit; reads only."""
        return holders_of(self._attempts.values(), self._scheduler, now_s)

    # ---- messages -----------------------------------------------------------------------------------

    def _on_reserve(self, router_id: RouterId, message: Reserve, now_s: float) -> None:
        work = message.work
        known = self._attempts.get(work.attempt_id)
        if known is not None and known.phase is not AttemptPhase.ENDING:
            return
        is_draining = self._draining.is_requested
        refused = self._admission.refusal(work, self._attempts.values(), is_draining=is_draining)
        if refused is None and not self._grant(router_id, message, now_s):
            refused = Refused(work.attempt_id, "no blocks", is_retryable=True)
        if refused is not None:
            self._effects.append(SendToRouter(router_id, refused))

    def _grant(self, router_id: RouterId, message: Reserve, now_s: float) -> bool:
        """Grant when there are blocks: for a transfer, or for a prefill here when little is missing."""
        reserved = self._admission.reserve(router_id, message, self._num_attempts, now_s)
        if reserved is None:
            return False
        attempt, block_table = reserved
        self._num_attempts += 1
        self._attempts[attempt.attempt_id] = attempt
        granted = Granted(attempt.attempt_id, attempt.num_cached_tokens, attempt.is_local)
        self._effects.append(SendToRouter(router_id, granted))
        if attempt.is_local:
            self._get_ready(attempt, block_table, attempt.num_cached_tokens, now_s)
        else:
            self._expect_transfer(attempt, block_table, now_s)
        return True

    def _on_cancel(self, message: Cancel, now_s: float) -> None:
        attempt = self._attempts.get(message.attempt_id)
        if attempt is None or attempt.phase is AttemptPhase.ENDING:
            return
        choices = set(message.choices or attempt.work.choices)
        if attempt.live_choices <= choices:
            self._end(attempt, "cancelled", now_s)
        else:
            self._generation.end_choices(attempt, choices)

    def _on_router_lost(self, router_id: RouterId, now_s: float) -> None:
        for attempt in list(self._attempts.values()):
            if attempt.router_id == router_id and attempt.phase is not AttemptPhase.ENDING:
                self._end(attempt, "router lost", now_s)

    # ---- transfers ----------------------------------------------------------------------------------

    def _expect_transfer(self, attempt: Attempt, block_table: tuple[int, ...], now_s: float) -> None:
        attempt.block_table = block_table
        attempt.last_activity_s = now_s
        self._deadlines.set(attempt.attempt_id, self._reservation_deadline_s(attempt))
        expected = TransferExpected(
            attempt_id=attempt.attempt_id,
            first_token=attempt.num_cached_tokens,
            num_tokens=len(attempt.work.token_ids),
            block_table=block_table,
            num_first_tokens=len(attempt.work.choices),
        )
        self._tell_receiver(expected, now_s)

    def _reservation_deadline_s(self, attempt: Attempt) -> float:
        return min(attempt.deadline_s, attempt.last_activity_s + self._reservation_timeout_s)

    def _note_activity(self, event: ReceiverEvent, now_s: float) -> None:
        """A reservation whose transfer moves does not time out; its deadline is moved when it fires."""
        if isinstance(event, _TransferActivity):
            attempt = self._attempts.get(event.transfer_id.attempt_id)
            if attempt is not None:
                attempt.last_activity_s = now_s

    def _tell_receiver(self, event: ReceiverEvent, now_s: float) -> None:
        self._take_receiver_effects(self._receiver.handle(event, now_s), now_s)

    def _take_receiver_effects(self, effects: Sequence[ReceiverEffect], now_s: float) -> None:
        for effect in effects:
            match effect:
                case TransferReceived():
                    self._on_transfer_received(effect, now_s)
                case TransferFailedLocally():
                    self._on_transfer_failed(effect, now_s)
                case AttemptReleased(attempt_id):
                    self._on_attempt_released(attempt_id)
                case _:
                    self._effects.append(effect)

    def _on_transfer_received(self, received: TransferReceived, now_s: float) -> None:
        """RESERVED -> READY: the choices join the batch with the tokens that the prefill worker sampled."""
        attempt = self._attempts.get(received.transfer_id.attempt_id)
        if attempt is None or attempt.phase is not AttemptPhase.RESERVED:
            raise self._invalid(f"{received.transfer_id} was received for {attempt}")
        attempt.transfer = received
        block_table, attempt.block_table = attempt.block_table, ()
        self._pool.convert(block_table, RefKind.HELD, RefKind.USED)
        tokens = {first.choice_idx: first.token for first in received.tokens}
        self._get_ready(attempt, block_table, len(attempt.work.token_ids), now_s)
        if attempt.live_choices <= tokens.keys():
            attempt.first_events = self._generation.start_choices(attempt, tokens)
            self._remove_if_finished(attempt)
        else:
            self._fail(attempt, f"first tokens only of choices {sorted(tokens)}", now_s, is_retryable=True)

    def _on_transfer_failed(self, failed: TransferFailedLocally, now_s: float) -> None:
        """The grant stands: the router may send another prefill worker, and has a full time-out to do so."""
        attempt = self._attempts.get(failed.transfer_id.attempt_id)
        if attempt is None or attempt.phase is not AttemptPhase.RESERVED:
            return
        attempt.last_activity_s = now_s
        reason = f"{failed.outcome} {failed.reason}".rstrip()
        message = TransferFailed(attempt.attempt_id, failed.transfer_id.prefill_try, reason)
        self._effects.append(SendToRouter(attempt.router_id, message))

    def _on_attempt_released(self, attempt_id: AttemptId) -> None:
        attempt = self._attempts.get(attempt_id)
        if attempt is None or attempt.phase is not AttemptPhase.ENDING:
            raise self._invalid(f"{attempt_id} was released as {attempt}")
        self._pool.release(attempt.block_table, RefKind.HELD)
        del self._attempts[attempt_id]

    # ---- steps --------------------------------------------------------------------------------------

    def _get_ready(self, attempt: Attempt, block_table: tuple[int, ...], num_computed: int, now_s: float) -> None:
        attempt.phase = AttemptPhase.READY
        attempt.ready_s = now_s
        self._deadlines.set(attempt.attempt_id, attempt.deadline_s)
        self._unstarted.append(attempt)
        self._generation.start_prompt(attempt, block_table, num_computed)

    def _start_step(self) -> None:
        plan = self._scheduler.schedule()
        if plan is not None:
            self._effects.append(RunStep(plan))

    def _tell_started(self, now_s: float) -> None:
        """Attempts that joined the batch, or ended before they needed to: now their queueing time is known."""
        waiting = []
        for attempt in self._unstarted:
            if attempt.sequences and not any(sequence.num_scheduled for sequence in attempt.sequences):
                waiting.append(attempt)
                continue
            attempt.started_s = now_s
            if not attempt.is_local:
                self._outbox.report(attempt, local_prefill_s=0.0)
                self._outbox.add(attempt, attempt.first_events)
        self._unstarted = waiting

    def _on_step_finished(self, result: StepResult, now_s: float) -> None:
        self._check_step(result.step_id)
        rows = {row.sequence_id: row for row in result.results}
        untrusted = {row.sequence_id for row in result.results if row.error is not None}
        for sequence in self._scheduler.finish_step(untrusted, result.duration_s):
            row = rows.get(sequence.sequence_id)
            if row is not None and sequence.phase is not SequencePhase.ENDED:
                self._on_row(self._attempts[sequence.work.attempt_id], sequence, row, now_s)

    def _on_row(self, attempt: Attempt, sequence: DecodeSequence, row: SequenceResult, now_s: float) -> None:
        if row.error is not None:
            self._fail(attempt, row.error, now_s, is_retryable=False)
            return
        assert len(row.tokens) == len(sequence.choices), f"{len(row.tokens)} tokens for {sequence}"
        if attempt.has_first_tokens:
            self._outbox.add(attempt, (self._generation.append(attempt, sequence, row.tokens[0]),))
        else:
            assert attempt.started_s is not None
            tokens = dict(zip(sequence.choices, row.tokens, strict=True))
            self._outbox.report(attempt, local_prefill_s=now_s - attempt.started_s)
            self._outbox.add(attempt, self._generation.start_choices(attempt, tokens))
        self._remove_if_finished(attempt)

    def _on_step_failed(self, step_id: int, reason: str, now_s: float) -> None:
        self._check_step(step_id)
        for sequence in self._scheduler.fail_step():
            if sequence.phase is not SequencePhase.ENDED:  # by the failure of a sibling
                attempt = self._attempts[sequence.work.attempt_id]
                self._fail(attempt, f"step failed: {reason}", now_s, is_retryable=True)

    def _check_step(self, step_id: int) -> None:
        if step_id != self._scheduler.step_id:
            raise self._invalid(f"event of step {step_id}, running is {self._scheduler.step_id}")

    # ---- ends ---------------------------------------------------------------------------------------

    def _on_expired(self, attempt: Attempt, now_s: float) -> None:
        if now_s >= attempt.deadline_s:
            self._fail(attempt, "deadline", now_s, is_retryable=False)
        elif now_s >= self._reservation_deadline_s(attempt):
            self._fail(attempt, "nothing was received for too long", now_s, is_retryable=True)
        else:
            self._deadlines.set(attempt.attempt_id, self._reservation_deadline_s(attempt))

    def _fail(self, attempt: Attempt, reason: str, now_s: float, *, is_retryable: bool) -> None:
        failed = AttemptFailed(attempt.attempt_id, reason, is_retryable)
        self._effects.append(SendToRouter(attempt.router_id, failed))
        self._end(attempt, reason, now_s)

    def _end(self, attempt: Attempt, reason: str, now_s: float) -> None:
        """Any live phase -> gone; RESERVED by way of ENDING, until nothing writes into its blocks any more."""
        self._deadlines.discard(attempt.attempt_id)
        self._outbox.forget(attempt.attempt_id)
        if attempt.phase is AttemptPhase.RESERVED:
            attempt.phase = AttemptPhase.ENDING
            self._tell_receiver(ExpectationWithdrawn(attempt.attempt_id, reason), now_s)
            return
        if attempt in self._unstarted:
            self._unstarted.remove(attempt)
        self._generation.end_choices(attempt, set(attempt.work.choices))
        del self._attempts[attempt.attempt_id]

    def _remove_if_finished(self, attempt: Attempt) -> None:
        if not attempt.live_choices:
            self._deadlines.discard(attempt.attempt_id)
            del self._attempts[attempt.attempt_id]

    def _end_drain(self, now_s: float) -> None:
        for attempt in list(self._attempts.values()):
            if attempt.phase is not AttemptPhase.ENDING:
                self._fail(attempt, "draining", now_s, is_retryable=True)
        if self._draining.ends(is_idle=True):
            self._effects.append(Drained())

    def _conclude(self, now_s: float) -> list[DecodeEffect]:
        """Use what the event made possible, then hand out everything decided."""
        if self._scheduler.step_id is None:
            self._start_step()
        self._tell_started(now_s)
        self._effects += self._outbox.flush()
        is_idle = not self._attempts and self._scheduler.step_id is None
        if self._draining.ends(is_idle=is_idle):
            self._effects.append(Drained())
        stored, evicted = self._pool.take_index_changes()
        if stored or evicted:
            self._effects.append(PublishBlocks(stored, evicted))
        effects, self._effects = self._effects, []
        return effects

    def check_invariants(self) -> None:
        self._pool.check_invariants()
        self._receiver.check_invariants()
        check_attempts(self._pool, self._scheduler, self._attempts)
        live = [a for a in self._attempts.values() if a.phase is not AttemptPhase.ENDING]
        assert len(self._deadlines) == len(live)
        assert all(attempt.phase is AttemptPhase.READY for attempt in self._unstarted)
        assert not self._effects

    def _invalid(self, problem: str) -> InvalidTransition:
        return InvalidTransition(f"{problem}; history: {', '.join(self._history)}")
