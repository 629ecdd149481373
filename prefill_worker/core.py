"""What a prefill worker decides: from a Prefill message to first tokens and shipped KV. Pure: no IO, no clock.

Drives the sender core, whose network effects come out unchanged. A Prefill that is not newer than the attempt's
current try is ignored. What both roles decide alike is in `common.worker.core`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from common.cores.core_loop import Core
from common.engine.contract.plan import SequenceResult, StepPlan
from common.engine.kv.block_pool import RefKind
from common.engine.scheduling.block_tables import PoolGroup
from common.engine.scheduling.scheduler import Limits, Scheduler
from common.engine.scheduling.sequence import Sequence as ScheduledSequence
from common.values.ids import RouterId
from common.values.messages import FirstTokens, Prefill
from common.values.request import ChunkTiming, SampledToken, TokenEvent
from common.worker.core import CoreState
from common.worker.events import RunStep
from kvtransfer.events import (
    FirstToken,
    FirstTokensSampled,
    SenderEffect,
    SenderEvent,
    TokensComputed,
    TransferCancelRequested,
    TransferEnded,
    TransferOutcome,
    TransferStarted,
)
from prefill_worker.admission import refusal
from prefill_worker.policy import PrefillPolicy
from prefill_worker.request import PrefillPhase, PrefillRequest


class PrefillCore:
    """The prefill half of a `WorkerCore`."""

    request_type: type[Any] = Prefill

    def __init__(
        self,
        groups: Sequence[PoolGroup],
        sender: Core[SenderEvent, SenderEffect],
        limits: Limits,
        hash_fields: Mapping[str, str],
        num_layers: int,
    ) -> None:
        scheduler = Scheduler(groups, limits, PrefillPolicy(limits.max_num_batched_tokens), hash_fields)
        self.state: CoreState[PrefillRequest] = CoreState(scheduler)
        self.transfers = sender
        self._num_layers = num_layers
        self._num_layers_done, self._step_started_s = 0, 0.0  # of the running step

    @property
    def num_uncached_tokens(self) -> int:
        scheduler = self.state.scheduler
        return sum(s.num_remaining - s.num_scheduled for s in (*scheduler.waiting, *scheduler.running))

    @property
    def prefill_tokens_per_s(self) -> float:
        return self.state.scheduler.rate.prefill_tokens_per_s

    @property
    def num_held(self) -> int:
        return sum(request.phase is PrefillPhase.COMPUTED for request in self.state.requests)

    def on_request(self, router_id: RouterId, message: Prefill, now_s: float) -> None:
        current = self.state.requests.get(message.work.attempt_id)
        if current is not None and current.prefill_try >= message.prefill_try:
            return
        if current is not None:
            self.end(current, "superseded by a newer try", now_s)
        refused = refusal(message, self.state)
        if refused is None:
            self.state.requests.add(self._queue(router_id, message, now_s))
        else:
            self.state.send(router_id, refused)

    def _queue(self, router_id: RouterId, message: Prefill, now_s: float) -> PrefillRequest:
        work, scheduler = message.work, self.state.scheduler
        rank = (work.priority, self.state.requests.num_added, 0)
        return PrefillRequest(
            message=message,
            router_id=router_id,
            sequence=scheduler.add(work, scheduler.blocks.hashes_of(work), rank),
            arrived_s=now_s,
            deadline_s=now_s + work.deadline_s,
            live_choices=set(work.choices),
        )

    # ---- steps --------------------------------------------------------------------------------------

    def on_planned(self, plan: StepPlan | None, now_s: float) -> None:
        """A request that is scheduled for the first time has its blocks: its transfer may start."""
        if plan is None:
            return
        self._step_started_s, self._num_layers_done = now_s, 0
        in_step = self._requests_in_step()
        for request in in_step:
            if request.started_s is None:
                self._start_transfer(request, now_s)
        is_transferring = any(request.is_transferring for request in in_step)
        self.state.effects.append(RunStep(plan, reports_layers=is_transferring))

    def on_layers(self, num_layers: int | None, now_s: float) -> None:
        if num_layers is None and self._num_layers_done == self._num_layers:
            return
        self._num_layers_done = self._num_layers if num_layers is None else num_layers
        for request in self._requests_in_step():
            token_end = request.sequence.num_computed + request.sequence.num_scheduled
            self._tell_sender(TokensComputed(request.transfer_id, self._num_layers_done, token_end), now_s)

    def on_row(
        self,
        request: PrefillRequest,
        sequence: ScheduledSequence,
        num_tokens: int,
        row: SequenceResult | None,
        now_s: float,
    ) -> None:
        start_s, end_s = self._step_started_s - request.arrived_s, now_s - request.arrived_s
        request.chunks.append(ChunkTiming(start_s, end_s, num_tokens))
        if row is not None:
            self._complete(request, row.tokens, now_s)

    def _complete(self, request: PrefillRequest, tokens: tuple[SampledToken, ...], now_s: float) -> None:
        """RUNNING -> COMPUTED: first tokens go out at once; the blocks stay for what is still to be shipped."""
        work = request.work
        assert len(tokens) == len(work.choices), f"{len(tokens)} tokens for {len(work.choices)} choices"
        self.state.scheduler.drop(request.sequence)
        drawn = tuple(zip(work.choices, tokens, strict=True))
        self.state.send(request.router_id, _first_tokens(request, drawn, now_s))
        sampled = tuple(FirstToken(choice, token) for choice, token in drawn)
        self._tell_sender(FirstTokensSampled(request.transfer_id, sampled), now_s)

    def _requests_in_step(self) -> list[PrefillRequest]:
        """The live requests that the running step computes."""
        live = [sequence for sequence in self.state.scheduler.in_step if not sequence.is_ended]
        requests = [self.state.requests.get(sequence.work.attempt_id) for sequence in live]
        return [request for request in requests if request is not None]

    # ---- transfers ----------------------------------------------------------------------------------

    def on_transfer_event(self, event: SenderEvent, now_s: float) -> None:
        self._tell_sender(event, now_s)

    def take_transfer_effects(self, effects: Sequence[SenderEffect], now_s: float) -> None:
        for effect in effects:
            if isinstance(effect, TransferEnded):
                self._on_transfer_ended(effect, now_s)
            else:
                self.state.effects.append(effect)

    def _tell_sender(self, event: SenderEvent, now_s: float) -> None:
        self.take_transfer_effects(self.transfers.handle(event, now_s), now_s)

    def _start_transfer(self, request: PrefillRequest, now_s: float) -> None:
        """The sender may connect, and ship what was cached."""
        sequence, message = request.sequence, request.message
        request.started_s = now_s
        request.block_tables = self.state.scheduler.blocks.hold(sequence)
        started = TransferStarted(
            transfer_id=request.transfer_id,
            peer=message.decode_worker,
            address=message.decode_address,
            first_token=message.first_missing_token,
            num_tokens=len(request.work.token_ids),
            block_tables=sequence.block_tables,
            deadline_s=request.deadline_s,
        )
        self._tell_sender(started, now_s)
        if sequence.num_cached_tokens > message.first_missing_token and request.is_transferring:
            computed = TokensComputed(request.transfer_id, self._num_layers, sequence.num_cached_tokens)
            self._tell_sender(computed, now_s)

    def _on_transfer_ended(self, ended: TransferEnded, now_s: float) -> None:
        """Nothing touches the blocks for the transfer any more. The decode worker may not know of a lost link."""
        request = self._of_transfer(ended)
        self.state.scheduler.blocks.release_tables(request.block_tables, RefKind.HELD)
        request.block_tables = ()
        reason = f"transfer: {ended.outcome} {ended.reason}".rstrip()
        match request.phase:
            case PrefillPhase.ENDING:
                del self.state.requests.ending[ended.transfer_id]
            case PrefillPhase.RUNNING:
                assert ended.outcome is not TransferOutcome.DONE, f"{request} was transferred before it was computed"
                self.fail(request, reason, now_s, is_retryable=True)
            case _:
                if ended.outcome is TransferOutcome.LINK_LOST:
                    self.state.send_failed(request, reason, is_retryable=True)
                self.state.requests.remove(request)

    def _of_transfer(self, ended: TransferEnded) -> PrefillRequest:
        attempt_id = ended.transfer_id.attempt_id
        current = self.state.requests.get(attempt_id)
        is_current = current is not None and current.transfer_id == ended.transfer_id
        request = current if is_current else self.state.requests.ending.get(ended.transfer_id)
        if request is None or not request.is_transferring:
            raise self.state.history.invalid(attempt_id, f"end of unknown transfer {ended.transfer_id}")
        return request

    # ---- ends ---------------------------------------------------------------------------------------

    def on_expired(self, request: PrefillRequest, now_s: float) -> None:
        self.fail(request, "deadline", now_s, is_retryable=False)

    def fail(self, request: PrefillRequest, reason: str, now_s: float, *, is_retryable: bool) -> None:
        if request.phase is not PrefillPhase.COMPUTED:
            self.state.send_failed(request, reason, is_retryable=is_retryable)
        self.end(request, reason, now_s)

    def end(self, request: PrefillRequest, reason: str, now_s: float) -> None:
        """Any live phase -> gone; by way of ENDING while a transfer touches its blocks."""
        request.is_ending = True
        self.state.requests.remove(request)
        if not request.sequence.is_ended:
            self.state.scheduler.drop(request.sequence)
        if request.is_transferring:
            self.state.requests.ending[request.transfer_id] = request
            self._tell_sender(TransferCancelRequested(request.transfer_id, reason), now_s)

    def end_choices(self, request: PrefillRequest, choices: set[int]) -> None:
        """One pass computes all choices: only when none is wanted any more there is something to save."""
        request.live_choices -= choices

    def check_request(self, request: PrefillRequest) -> None:
        is_started = request.phase is not PrefillPhase.WAITING
        assert request.is_transferring == is_started, str(request)
        assert request.is_ending == (self.state.requests.get(request.attempt_id) is not request), str(request)


def _first_tokens(request: PrefillRequest, drawn: Sequence[tuple[int, SampledToken]], now_s: float) -> FirstTokens:
    work, position = request.work, request.work.num_output_tokens
    assert request.started_s is not None
    return FirstTokens(
        request.attempt_id,
        request.prefill_try,
        tuple(
            TokenEvent(choice, position, token, work.sampling.finish_reason(token.token_id, position + 1))
            for choice, token in drawn
            if not work.sampling.num_beams  # which token is first shows when the search ends
        ),
        queue_s=request.started_s - request.arrived_s,
        prefill_s=now_s - request.started_s,
        num_cached_tokens=request.sequence.num_cached_tokens,
        chunks=tuple(request.chunks),
    )
