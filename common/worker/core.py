"""The decisions that both roles share: messages, steps, deadlines, drain, statistics, audit. Pure: no IO, no clock.

`WorkerCore` drives one `RoleCore`, which decides what is its role's own. One step runs at a time; what became possible
during an event is scheduled at its end.

Failures: a row that is not finite fails its request for good. A step that raises fails every request in it, retryable:
the router places them again, a bounded number of times, so a poisonous one cannot loop here. Late and duplicate
messages and network events of ended transfers are ignored; a local event out of place raises InvalidTransition.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol

from common.cores.core_loop import Core
from common.cores.deadlines import earliest
from common.cores.draining import Draining
from common.cores.history import History
from common.engine.contract.executor import LayerComputed, StepFailed, StepFinished
from common.engine.contract.plan import SequenceResult, StepPlan, StepResult
from common.engine.scheduling.block_tables import BlockTables, num_blocks
from common.engine.scheduling.invariants import check_scheduler
from common.engine.scheduling.scheduler import Scheduler
from common.engine.scheduling.sequence import Sequence as ScheduledSequence
from common.values.ids import RouterId
from common.values.messages import (
    AttemptFailed,
    BlockHolder,
    Cancel,
    PromptScored,
    WorkerMessage,
    WorkerState,
    WorkerStats,
)
from common.worker.events import (
    Drained,
    DrainRequested,
    MessageReceived,
    PublishBlocks,
    RouterLost,
    SendToRouter,
)
from common.worker.requests import Requests, RequestT, WorkerRequest

_WORKER = "worker"  # the key of events that are of no single request


@dataclass(slots=True)
class CoreState(Generic[RequestT]):
    """What a role's core and the common one both change; owned by the role's."""

    scheduler: Scheduler
    requests: Requests[RequestT] = field(default_factory=Requests)
    draining: Draining = field(default_factory=Draining)
    history: History = field(default_factory=History)
    effects: list[Any] = field(default_factory=list)

    def send(self, router_id: RouterId, message: WorkerMessage) -> None:
        self.effects.append(SendToRouter(router_id, message))

    def send_failed(self, request: WorkerRequest, reason: str, *, is_retryable: bool) -> None:
        failed = AttemptFailed(request.attempt_id, reason, is_retryable, request.prefill_try)
        self.send(request.router_id, failed)


class RoleCore(Protocol[RequestT]):
    """What differs between the roles."""

    state: CoreState[RequestT]
    transfers: Core[Any, Any]  # its half of the handoff
    request_type: type[Any]  # of the message that asks for work

    def on_request(self, router_id: RouterId, message: Any, now_s: float) -> None:
        """Take the work or refuse it."""
        ...

    def on_transfer_event(self, event: Any, now_s: float) -> None: ...

    def take_transfer_effects(self, effects: Sequence[Any], now_s: float) -> None: ...

    def on_layers(self, num_layers: int | None, now_s: float) -> None:
        """The running step has written the KV of so many layers. None = of all: the step has ended."""
        ...

    def on_row(
        self, request: RequestT, sequence: ScheduledSequence, num_tokens: int, row: SequenceResult | None, now_s: float
    ) -> None:
        """A finished step has computed so many tokens, and drawn `row`. The row has no error."""
        ...

    def on_planned(self, plan: StepPlan | None, now_s: float) -> None:
        """The end of an event: run the step that was planned, if any, and say what is to be said."""
        ...

    def on_expired(self, request: RequestT, now_s: float) -> None: ...

    def fail(self, request: RequestT, reason: str, now_s: float, *, is_retryable: bool) -> None:
        """End a request and say so, unless the router already has what it asked for."""
        ...

    def end(self, request: RequestT, reason: str, now_s: float) -> None: ...

    def end_choices(self, request: RequestT, choices: set[int]) -> None:
        """Some are no longer wanted, others still are."""
        ...

    @property
    def num_uncached_tokens(self) -> int:
        """Prompt tokens that wait to be computed."""
        ...

    @property
    def prefill_tokens_per_s(self) -> float: ...

    @property
    def num_held(self) -> int:
        """Live requests that wait for a transfer alone."""
        ...

    def check_request(self, request: RequestT) -> None:
        """Raise AssertionError when what it says of itself does not fit together."""
        ...


class WorkerCore(Generic[RequestT]):
    """`handle` is the only mutator, `handle_deadline` its sibling for the passing of time."""

    def __init__(self, role: RoleCore[RequestT]) -> None:
        self.role = role

    @property
    def blocks(self) -> BlockTables:
        """To read."""
        return self.role.state.scheduler.blocks

    @property
    def adapters_in_use(self) -> set[str]:
        """Digests of the adapters that live work wants, or that the running step computes with; "" for none."""
        state = self.role.state
        sequences = (*state.scheduler.in_step, *state.scheduler.waiting, *state.scheduler.running)
        works = [*(request.work for request in state.requests), *(sequence.work for sequence in sequences)]
        return {work.adapter.digest for work in works}

    def handle(self, event: Any, now_s: float) -> list[Any]:
        state, role = self.role.state, self.role
        state.history.note(_subject(event), f"{now_s:.3f} {type(event).__name__}")
        match event:
            case MessageReceived(router_id, message):
                self._on_message(router_id, message, now_s)
            case RouterLost(router_id):
                for request in state.requests:
                    if request.router_id == router_id:
                        role.end(request, "router lost", now_s)
            case LayerComputed(step_id, num_layers):
                self._check_step(step_id)
                role.on_layers(num_layers, now_s)
            case StepFinished(result):
                self._on_step_finished(result, now_s)
            case StepFailed(step_id, reason):
                self._on_step_failed(step_id, reason, now_s)
            case DrainRequested(grace_s):
                state.draining.request(now_s + grace_s)
            case _:
                role.on_transfer_event(event, now_s)
        return self._conclude(now_s)

    def handle_deadline(self, now_s: float) -> list[Any]:
        state, role = self.role.state, self.role
        for request in state.requests.pop_expired(now_s):
            state.history.note(request.attempt_id, f"{now_s:.3f} deadline")
            role.on_expired(request, now_s)
        role.take_transfer_effects(role.transfers.handle_deadline(now_s), now_s)
        if state.draining.is_due(now_s):
            for request in state.requests:
                role.fail(request, "draining", now_s, is_retryable=True)
            self._end_drain(is_idle=True)
        return self._conclude(now_s)

    def next_deadline_s(self) -> float | None:
        state = self.role.state
        return earliest(
            state.requests.next_deadline_s(), self.role.transfers.next_deadline_s(), state.draining.next_s()
        )

    def stats(self, now_s: float) -> WorkerStats:
        """What routers are sent about this worker; reads only."""
        state, role = self.role.state, self.role
        pool, scheduler = self.blocks.reported_stats(), state.scheduler
        return WorkerStats(
            state=WorkerState.DRAINING if state.draining.is_requested else WorkerState.READY,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_waiting_uncached_tokens=role.num_uncached_tokens,
            kv_blocks_used=pool.used,
            kv_blocks_cached=pool.cached,
            kv_blocks_free=pool.free,
            kv_blocks_held=pool.held,
            prefill_tokens_per_s=role.prefill_tokens_per_s,
            step_s=scheduler.rate.step_s,
            num_preemptions=scheduler.num_preemptions,
            num_held_attempts=role.num_held,
        )

    def holders(self, now_s: float) -> list[BlockHolder]:
        """Who holds blocks, for an audit: requests, then ended sequences that the running step still computes."""
        state = self.role.state
        held = [_holder(request, now_s) for request in state.requests.all]
        ended = [
            BlockHolder(sequence.work.attempt_id, "ended, in a step", num_blocks([sequence.block_tables]), 0.0, 0.0)
            for sequence in state.scheduler.in_step
            if sequence.is_ended
        ]
        return [holder for holder in (*held, *ended) if holder.num_blocks]

    def check_invariants(self) -> None:
        state = self.role.state
        self.role.transfers.check_invariants()
        state.requests.check_invariants()
        requests = state.requests.all
        owned = [sequence for request in requests for sequence in request.sequences]
        check_scheduler(state.scheduler, owned, [request.block_tables for request in requests])
        for request in requests:
            self.role.check_request(request)
        assert not state.effects

    # ---- private ------------------------------------------------------------------------------------

    def _on_message(self, router_id: RouterId, message: Any, now_s: float) -> None:
        if isinstance(message, Cancel):
            self._on_cancel(message, now_s)
        elif isinstance(message, self.role.request_type):
            self.role.on_request(router_id, message, now_s)
        else:
            problem = f"not a message for this role: {type(message).__name__}"
            raise self.role.state.history.invalid(message.work.attempt_id, problem)

    def _on_cancel(self, message: Cancel, now_s: float) -> None:
        request = self.role.state.requests.get(message.attempt_id)
        if request is None:
            return
        choices = set(message.choices or request.work.choices)
        if request.live_choices <= choices:
            self.role.end(request, "cancelled", now_s)
        else:
            self.role.end_choices(request, choices)

    def _on_step_finished(self, result: StepResult, now_s: float) -> None:
        self._check_step(result.step_id)
        self.role.on_layers(None, now_s)
        for sequence, num_tokens, row in self.role.state.scheduler.finish_step(result):
            if sequence.is_ended:  # by the failure of a sibling
                continue
            request = self._request_of(sequence)
            if row is not None and row.error is not None:
                self.role.fail(request, row.error, now_s, is_retryable=False)
                continue
            if row is not None and row.prompt_logprobs is not None:
                scored = PromptScored(request.attempt_id, row.prompt_logprobs, request.prefill_try)
                self.role.state.send(request.router_id, scored)
            self.role.on_row(request, sequence, num_tokens, row if row is not None and row.runs else None, now_s)

    def _on_step_failed(self, step_id: int, reason: str, now_s: float) -> None:
        self._check_step(step_id)
        for sequence in self.role.state.scheduler.fail_step():
            if not sequence.is_ended:
                self.role.fail(self._request_of(sequence), f"step failed: {reason}", now_s, is_retryable=True)

    def _request_of(self, sequence: ScheduledSequence) -> RequestT:
        request = self.role.state.requests.get(sequence.work.attempt_id)
        assert request is not None, f"{sequence} has no live request"
        return request

    def _check_step(self, step_id: int) -> None:
        state = self.role.state
        if step_id != state.scheduler.step_id:
            raise state.history.invalid(_WORKER, f"event of step {step_id}, running is {state.scheduler.step_id}")

    def _conclude(self, now_s: float) -> list[Any]:
        """Use what the event made possible, then hand out everything decided."""
        state, scheduler = self.role.state, self.role.state.scheduler
        self.role.on_planned(scheduler.schedule() if scheduler.step_id is None else None, now_s)
        self._end_drain(is_idle=not state.requests.all and scheduler.step_id is None)
        stored, evicted = scheduler.blocks.index_changes.take()
        if stored or evicted:
            state.effects.append(PublishBlocks(stored, evicted))
        effects, state.effects = state.effects, []
        return effects

    def _end_drain(self, *, is_idle: bool) -> None:
        if self.role.state.draining.ends(is_idle=is_idle):
            self.role.state.effects.append(Drained())


def _subject(event: Any) -> Hashable:
    """The key of an event's history."""
    if not isinstance(event, MessageReceived):
        return _WORKER
    message = event.message
    return message.attempt_id if isinstance(message, Cancel) else message.work.attempt_id


def _holder(request: WorkerRequest, now_s: float) -> BlockHolder:
    tables = [request.block_tables, *(sequence.block_tables for sequence in request.sequences)]
    age_s, time_left_s = now_s - request.arrived_s, request.deadline_s - now_s
    return BlockHolder(
        request.attempt_id, str(request.phase), num_blocks(tables), age_s, time_left_s, request.prefill_try
    )
