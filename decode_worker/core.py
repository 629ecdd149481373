"""What a decode worker decides: from a reservation to the last token of every choice. Pure: no IO, no clock.

Drives the receiver core, whose network effects come out unchanged. Sequences join and leave at every step. A failed
transfer leaves the grant standing. A Reserve of an attempt that is here is ignored. What both roles decide alike is in
`common.worker.core`.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from common.cores.core_loop import Core
from common.engine.contract.plan import SequenceResult, StepPlan
from common.engine.kv.block_pool import RefKind
from common.engine.scheduling.block_tables import PoolGroup
from common.engine.scheduling.scheduler import Limits, Scheduler
from common.engine.scheduling.sequence import BlockTableSet
from common.engine.scheduling.sequence import Sequence as ScheduledSequence
from common.values.ids import AttemptId, RouterId
from common.values.messages import AttemptTokens, Granted, HandoffReport, Refused, Reserve, TokenBatch, TransferFailed
from common.values.request import SampledToken, TokenEvent
from common.worker.core import CoreState
from common.worker.events import RunStep, SendToRouter
from decode_worker.admission import refusal, reserve
from decode_worker.beams import go_on, start_beams
from decode_worker.policy import DecodePolicy
from decode_worker.request import DecodePhase, DecodeRequest
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

# A reservation of which nothing was received for so long is given up.
RESERVATION_TIMEOUT_S = 120.0

_TransferActivity = ChunkAnnounced | ChunkReceived | ChunkWritten | FinishAnnounced


class DecodeCore:
    """The decode half of a `WorkerCore`."""

    request_type: type[Any] = Reserve

    def __init__(
        self,
        groups: Sequence[PoolGroup],
        receiver: Core[ReceiverEvent, ReceiverEffect],
        limits: Limits,
        hash_fields: Mapping[str, str],
        reservation_timeout_s: float = RESERVATION_TIMEOUT_S,
    ) -> None:
        self.policy = DecodePolicy(limits)
        self.state: CoreState[DecodeRequest] = CoreState(Scheduler(groups, limits, self.policy, hash_fields))
        self.transfers = receiver
        self._reservation_timeout_s = reservation_timeout_s
        self._outbox = _Outbox()
        self._unstarted: list[DecodeRequest] = []  # READY and in no step yet

    @property
    def num_uncached_tokens(self) -> int:
        """Of local prefills and of preempted sequences."""
        scheduler = self.state.scheduler
        return sum(s.num_remaining for s in (*scheduler.waiting, *scheduler.running) if not s.is_decoding)

    @property
    def prefill_tokens_per_s(self) -> float:
        return self.policy.prefill_tokens_per_s(self.state.scheduler)

    @property
    def num_held(self) -> int:
        return sum(request.phase is DecodePhase.RESERVED for request in self.state.requests)

    def on_request(self, router_id: RouterId, message: Reserve, now_s: float) -> None:
        work = message.work
        if self.state.requests.get(work.attempt_id) is not None:
            return
        refused = refusal(work, self.state)
        if refused is None and not self._grant(router_id, message, now_s):
            refused = Refused(work.attempt_id, "no blocks", is_retryable=True)
        if refused is not None:
            self.state.send(router_id, refused)

    def _grant(self, router_id: RouterId, message: Reserve, now_s: float) -> bool:
        """Grant when there are blocks: for a transfer, or for a prefill here when little is missing."""
        reserved = reserve(router_id, message, self.state, now_s)
        if reserved is None:
            return False
        request, block_tables = reserved
        self.state.requests.add(request)
        self.state.send(router_id, Granted(request.attempt_id, request.num_cached_tokens, request.is_local))
        if request.is_local:
            self._get_ready(request, block_tables, request.num_cached_tokens, now_s)
        else:
            self._expect_transfer(request, block_tables, now_s)
        return True

    # ---- transfers ----------------------------------------------------------------------------------

    def on_transfer_event(self, event: ReceiverEvent, now_s: float) -> None:
        """A reservation whose transfer moves does not time out; its deadline is moved when it fires."""
        if isinstance(event, _TransferActivity):
            request = self.state.requests.get(event.transfer_id.attempt_id)
            if request is not None:
                request.last_activity_s = now_s
        self._tell_receiver(event, now_s)

    def take_transfer_effects(self, effects: Sequence[ReceiverEffect], now_s: float) -> None:
        for effect in effects:
            match effect:
                case TransferReceived():
                    self._on_transfer_received(effect, now_s)
                case TransferFailedLocally():
                    self._on_transfer_failed(effect, now_s)
                case AttemptReleased(attempt_id):
                    self._on_attempt_released(attempt_id)
                case _:
                    self.state.effects.append(effect)

    def _tell_receiver(self, event: ReceiverEvent, now_s: float) -> None:
        self.take_transfer_effects(self.transfers.handle(event, now_s), now_s)

    def _expect_transfer(self, request: DecodeRequest, block_tables: BlockTableSet, now_s: float) -> None:
        request.block_tables = block_tables
        request.last_activity_s = now_s
        self.state.requests.set_deadline(request, self._reservation_deadline_s(request))
        expected = TransferExpected(
            attempt_id=request.attempt_id,
            first_token=request.num_cached_tokens,
            num_tokens=len(request.work.token_ids),
            block_tables=block_tables,
            num_first_tokens=len(request.work.choices),
        )
        self._tell_receiver(expected, now_s)

    def _reservation_deadline_s(self, request: DecodeRequest) -> float:
        return min(request.deadline_s, request.last_activity_s + self._reservation_timeout_s)

    def _on_transfer_received(self, received: TransferReceived, now_s: float) -> None:
        """RESERVED -> READY: the choices join the batch with the tokens that the prefill worker sampled."""
        attempt_id = received.transfer_id.attempt_id
        request = self.state.requests.get(attempt_id)
        if request is None or request.phase is not DecodePhase.RESERVED:
            raise self.state.history.invalid(attempt_id, f"{received.transfer_id} was received for {request}")
        request.transfer = received
        block_tables, request.block_tables = request.block_tables, ()
        self.state.scheduler.blocks.use_held(block_tables)
        tokens = {first.choice_idx: first.token for first in received.tokens}
        self._get_ready(request, block_tables, len(request.work.token_ids), now_s)
        num_candidates = min((len(token.top) for token in tokens.values()), default=0)
        if request.live_choices <= tokens.keys() and num_candidates >= request.work.sampling.num_candidates:
            request.first_events = self._start_choices(request, tokens)
            self._remove_if_finished(request)
        else:
            reason = f"first tokens only of choices {sorted(tokens)}, or too few candidates: {num_candidates}"
            self.fail(request, reason, now_s, is_retryable=True)

    def _on_transfer_failed(self, failed: TransferFailedLocally, now_s: float) -> None:
        """The grant stands: the router may send another prefill worker, and has a full time-out to do so."""
        request = self.state.requests.get(failed.transfer_id.attempt_id)
        if request is None or request.phase is not DecodePhase.RESERVED:
            return
        request.last_activity_s = now_s
        reason = f"{failed.outcome} {failed.reason}".rstrip()
        message = TransferFailed(request.attempt_id, failed.transfer_id.prefill_try, reason)
        self.state.send(request.router_id, message)

    def _on_attempt_released(self, attempt_id: AttemptId) -> None:
        request = self.state.requests.ending.pop(attempt_id, None)
        if request is None:
            raise self.state.history.invalid(attempt_id, f"released as {self.state.requests.get(attempt_id)}")
        self.state.scheduler.blocks.release_tables(request.block_tables, RefKind.HELD)

    # ---- steps --------------------------------------------------------------------------------------

    def _get_ready(self, request: DecodeRequest, block_tables: BlockTableSet, num_computed: int, now_s: float) -> None:
        request.phase = DecodePhase.READY
        request.ready_s = now_s
        self.state.requests.set_deadline(request, request.deadline_s)
        self._unstarted.append(request)
        rank = (request.work.priority, request.order, 0)
        prompt = self.state.scheduler.add(request.work, request.hashes, rank, block_tables, num_computed)
        request.sequences = [prompt]  # all choices share it

    def on_planned(self, plan: StepPlan | None, now_s: float) -> None:
        """The step is decided before tokens are sent: the device starts before messages are encoded."""
        if plan is not None:
            self.state.effects.append(RunStep(plan))
        self._report_started(now_s)
        self.state.effects += self._outbox.flush()

    def _report_started(self, now_s: float) -> None:
        """Requests that joined the batch, or ended before they needed to: now their queueing time is known."""
        waiting = []
        for request in self._unstarted:
            if request.sequences and not any(sequence.num_scheduled for sequence in request.sequences):
                waiting.append(request)
                continue
            request.started_s = now_s
            if not request.is_local:
                self._outbox.report(request, local_prefill_s=0.0)
                self._outbox.add(request, request.first_events)
        self._unstarted = waiting

    def on_layers(self, num_layers: int | None, now_s: float) -> None:
        """Its steps ship nothing."""

    def on_row(
        self,
        request: DecodeRequest,
        sequence: ScheduledSequence,
        num_tokens: int,
        row: SequenceResult | None,
        now_s: float,
    ) -> None:
        if row is None:
            return
        assert len(row.tokens) == len(sequence.choices), f"{len(row.tokens)} tokens for {sequence}"
        if request.beams is not None:
            self._outbox.add(request, go_on(self.state.scheduler, request, sequence, row.tokens[0]))
        elif request.has_first_tokens:
            self._go_on(request, sequence, row.runs[0])
        else:
            assert request.started_s is not None
            tokens = dict(zip(sequence.choices, row.tokens, strict=True))
            self._outbox.report(request, local_prefill_s=now_s - request.started_s)
            self._outbox.add(request, self._start_choices(request, tokens))
        self._remove_if_finished(request)

    def _go_on(self, request: DecodeRequest, sequence: ScheduledSequence, run: Sequence[SampledToken]) -> None:
        """The next tokens of one choice: accepted drafts and the one behind them. A choice that is finished leaves at
        once, and what comes behind its end is dropped."""
        events: list[TokenEvent] = []
        for token in run:
            events.append(sequence.next_event(sequence.choices[0], token))
            if events[-1].finish_reason is not None:
                break
            sequence.token_ids.append(token.token_id)
        self._outbox.add(request, events)
        if sequence.draft_token_ids:
            self._outbox.count_drafts(request, len(sequence.draft_token_ids), len(events) - 1)
            self.state.scheduler.settle(sequence, len(events) - 1)
        if events[-1].finish_reason is not None:
            self.end_choices(request, {events[-1].choice_idx})
        if sequence.is_ended and self.policy.speculation is not None:
            self.policy.speculation.ended(sequence)

    def _start_choices(self, request: DecodeRequest, tokens: Mapping[int, SampledToken]) -> tuple[TokenEvent, ...]:
        """The prompt is computed and each choice has its first token: one sequence per choice that goes on."""
        if request.work.sampling.num_beams:
            return start_beams(self.state.scheduler, request, next(iter(tokens.values())))
        (prompt,) = request.sequences
        choices = [choice for choice in request.work.choices if choice in request.live_choices]
        events = tuple(prompt.next_event(choice, tokens[choice]) for choice in choices)
        going_on = [event.choice_idx for event in events if event.finish_reason is None]
        request.live_choices = set(going_on)
        request.has_first_tokens = True
        if not going_on:
            self.state.scheduler.drop(prompt)
            request.sequences = []
            return events
        forks = [self._fork(request, prompt, choice) for choice in going_on[1:]]
        prompt.choices = (going_on[0],)
        request.sequences = [prompt, *forks]
        for sequence in request.sequences:
            sequence.token_ids.append(tokens[sequence.choices[0]].token_id)
        return events

    def _fork(self, request: DecodeRequest, prompt: ScheduledSequence, choice: int) -> ScheduledSequence:
        rank = (request.work.priority, request.order, request.work.choices.index(choice))
        return self.state.scheduler.fork(prompt, choice, rank)

    # ---- ends ---------------------------------------------------------------------------------------

    def on_expired(self, request: DecodeRequest, now_s: float) -> None:
        if now_s >= request.deadline_s:
            self.fail(request, "deadline", now_s, is_retryable=False)
        elif now_s >= self._reservation_deadline_s(request):
            self.fail(request, "nothing was received for too long", now_s, is_retryable=True)
        else:
            self.state.requests.set_deadline(request, self._reservation_deadline_s(request))

    def fail(self, request: DecodeRequest, reason: str, now_s: float, *, is_retryable: bool) -> None:
        self.state.send_failed(request, reason, is_retryable=is_retryable)
        self.end(request, reason, now_s)

    def end(self, request: DecodeRequest, reason: str, now_s: float) -> None:
        """Any live phase -> gone; RESERVED by way of ENDING, until nothing writes into its blocks any more."""
        self.state.requests.remove(request)
        self._outbox.forget(request.attempt_id)
        if request.phase is DecodePhase.RESERVED:
            request.phase = DecodePhase.ENDING
            self.state.requests.ending[request.attempt_id] = request
            self._tell_receiver(ExpectationWithdrawn(request.attempt_id, reason), now_s)
            return
        if request in self._unstarted:
            self._unstarted.remove(request)
        self.end_choices(request, set(request.work.choices))

    def end_choices(self, request: DecodeRequest, choices: set[int]) -> None:
        """The prompt's sequence goes only with the last choice that wants it."""
        request.live_choices -= choices
        if request.beams is not None and request.live_choices:
            return  # which beams become them is not known yet
        for sequence in tuple(request.sequences):
            if request.live_choices.isdisjoint(sequence.choices):
                self.state.scheduler.drop(sequence)
                request.sequences.remove(sequence)

    def _remove_if_finished(self, request: DecodeRequest) -> None:
        if not request.live_choices:
            self.state.requests.remove(request)

    def check_request(self, request: DecodeRequest) -> None:
        is_ready = request.phase is DecodePhase.READY
        assert is_ready == (not request.block_tables), str(request)
        assert is_ready == bool(request.sequences), str(request)
        assert (request.phase is DecodePhase.ENDING) == (request.attempt_id in self.state.requests.ending), str(request)
        assert request.live_choices, str(request)
        generated = {choice for sequence in request.sequences for choice in sequence.choices}
        assert not is_ready or generated >= request.live_choices, str(request)
        assert not is_ready or request.has_first_tokens or len(request.sequences) == 1, str(request)
        assert is_ready or request not in self._unstarted, str(request)


class _Outbox:
    """What one event sends to the routers about tokens: reports first, then a batch per router. `flush` empties it."""

    def __init__(self) -> None:
        self._reports: dict[AttemptId, tuple[RouterId, HandoffReport]] = {}
        self._tokens: dict[RouterId, dict[AttemptId, list[TokenEvent]]] = {}
        self._drafts: dict[AttemptId, tuple[int, int]] = {}  # verified, accepted

    def report(self, request: DecodeRequest, local_prefill_s: float) -> None:
        """How the request's prompt came here; once, before its first tokens."""
        transfer = request.transfer
        assert request.started_s is not None
        report = HandoffReport(
            request.attempt_id,
            num_bytes=transfer.num_bytes if transfer else 0,
            num_chunks=transfer.num_chunks if transfer else 0,
            transfer_s=transfer.transfer_s if transfer else 0.0,
            exposed_s=transfer.exposed_s if transfer else 0.0,
            decode_queue_s=request.started_s - request.ready_s,
            num_cached_tokens=request.num_cached_tokens,
            is_local=request.is_local,
            local_prefill_s=local_prefill_s,
            chunks=transfer.chunks if transfer else (),
            transport=transfer.transport if transfer else "",
            link_bytes_per_s=transfer.link_bytes_per_s if transfer else 0.0,
        )
        self._reports[request.attempt_id] = (request.router_id, report)

    def add(self, request: DecodeRequest, events: Iterable[TokenEvent]) -> None:
        attempts = self._tokens.setdefault(request.router_id, {})
        attempts.setdefault(request.attempt_id, []).extend(events)

    def count_drafts(self, request: DecodeRequest, num_drafts: int, num_accepted: int) -> None:
        """What was verified for the tokens that go out with it."""
        before = self._drafts.get(request.attempt_id, (0, 0))
        self._drafts[request.attempt_id] = before[0] + num_drafts, before[1] + num_accepted

    def forget(self, attempt_id: AttemptId) -> None:
        """The request failed or was cancelled: what it made meanwhile is of no use."""
        self._reports.pop(attempt_id, None)
        self._drafts.pop(attempt_id, None)
        for attempts in self._tokens.values():
            attempts.pop(attempt_id, None)

    def flush(self) -> list[SendToRouter]:
        effects = [SendToRouter(router_id, report) for router_id, report in self._reports.values()]
        for router_id, attempts in self._tokens.items():
            if attempts:
                batch = TokenBatch(
                    tuple(
                        AttemptTokens(a, tuple(events), *self._drafts.get(a, (0, 0))) for a, events in attempts.items()
                    )
                )
                effects.append(SendToRouter(router_id, batch))
        self._reports.clear()
        self._drafts.clear()
        self._tokens.clear()
        return effects
