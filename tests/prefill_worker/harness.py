"""A prefill core with a scripted sender and hand-driven steps. Checks every invariant after every event."""

from collections.abc import Sequence
from typing import Any

from common.engine.contract.executor import LayerComputed, StepFinished
from common.engine.contract.plan import SequenceResult, StepPlan, StepResult
from common.engine.kv.block_pool import BlockPool
from common.engine.scheduling.block_tables import PoolGroup
from common.engine.scheduling.scheduler import Limits
from common.values.ids import RouterId, TransferId, WorkerRef
from common.values.messages import AttemptFailed, FirstTokens, Prefill, Refused
from common.values.request import SampledToken, SamplingParams, Work
from common.worker.core import WorkerCore
from common.worker.events import MessageReceived
from kvtransfer.events import (
    AcknowledgedByPeer,
    CancelledByPeer,
    FirstTokensSampled,
    PeerLost,
    SenderEffect,
    SenderEvent,
    TransferCancelRequested,
    TransferEnded,
    TransferOutcome,
    TransferStarted,
)
from prefill_worker.core import PrefillCore
from tests.core_bench import ROUTER, CoreBench, attempt

DECODE = WorkerRef("d0", "1")
NUM_LAYERS = 4


class ScriptedSender:
    """Ends transfers as the test asks: Acknowledged, Cancelled by the peer, or a local cancel unless `is_packing`."""

    def __init__(self) -> None:
        self.events: list[SenderEvent] = []
        self.active: dict[TransferId, TransferStarted] = {}
        self.is_packing = False
        self.ends_at_start = False
        self.deadline_s: float | None = None

    def handle(self, event: SenderEvent, now_s: float) -> Sequence[SenderEffect]:
        self.events.append(event)
        match event:
            case TransferStarted(transfer_id):
                assert transfer_id not in self.active
                self.active[transfer_id] = event
                return self.end(transfer_id, TransferOutcome.LINK_LOST) if self.ends_at_start else []
            case TransferCancelRequested(transfer_id):
                return [] if self.is_packing else self.end(transfer_id, TransferOutcome.CANCELLED)
            case AcknowledgedByPeer(transfer_id):
                return self.end(transfer_id, TransferOutcome.DONE)
            case CancelledByPeer(transfer_id):
                return self.end(transfer_id, TransferOutcome.CANCELLED)
            case PeerLost(peer):
                lost = [transfer_id for transfer_id, started in self.active.items() if started.peer == peer]
                return [effect for transfer_id in lost for effect in self.end(transfer_id, TransferOutcome.LINK_LOST)]
        return []

    def end(self, transfer_id: TransferId, outcome: TransferOutcome) -> list[SenderEffect]:
        if self.active.pop(transfer_id, None) is None:
            return []
        return [TransferEnded(transfer_id, outcome, "scripted")]

    def handle_deadline(self, now_s: float) -> Sequence[SenderEffect]:
        expired = [transfer_id for transfer_id, event in self.active.items() if event.deadline_s <= now_s]
        return [effect for transfer_id in expired for effect in self.end(transfer_id, TransferOutcome.CANCELLED)]

    def next_deadline_s(self) -> float | None:
        return min((event.deadline_s for event in self.active.values()), default=None)

    def check_invariants(self) -> None:
        pass


class Bench(CoreBench):
    """`sent` holds FirstTokens, Refused and AttemptFailed."""

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 16,
        budget: int = 64,
        max_num_seqs: int = 8,
        max_num_waiting: int = 8,
        groups: Sequence[PoolGroup] | None = None,
    ) -> None:
        groups = groups or [PoolGroup(BlockPool(num_blocks, block_size))]
        self.sender = ScriptedSender()
        limits = Limits(budget, max_num_seqs, max_num_waiting)
        self.role = PrefillCore(groups, self.sender, limits, {"model": "m"}, NUM_LAYERS)
        super().__init__(WorkerCore(self.role))

    def prefill(self, message: Prefill, router_id: RouterId = ROUTER) -> list[Any]:
        return self.handle(MessageReceived(router_id, message))

    def acknowledge(self, name: str, prefill_try: int = 0) -> list[Any]:
        return self.handle(AcknowledgedByPeer(TransferId(attempt(name), prefill_try)))

    def lose_transfer(self, name: str, prefill_try: int = 0) -> list[Any]:
        return self.handle(CancelledByPeer(TransferId(attempt(name), prefill_try), "gone"))

    def lose_link(self) -> list[Any]:
        return self.handle(PeerLost(DECODE, "gone"))

    def step(self, seconds: float = 0.01) -> list[Any]:
        """With its layers."""
        plan = self._take_plan(seconds)
        result = self.runner.run(plan)
        for num_layers in range(1, NUM_LAYERS + 1):
            self.handle(LayerComputed(plan.step_id, num_layers))
        return self.handle(StepFinished(result))

    def computed(self) -> list[TransferId]:
        """Transfers of prompts that wait for nothing but the peer."""
        done = {event.transfer_id for event in self.sender.events if isinstance(event, FirstTokensSampled)}
        return [transfer_id for transfer_id in self.sender.active if transfer_id in done]

    def messages(self, name: str) -> list[FirstTokens | Refused | AttemptFailed]:
        return [message for message in self.sent if message.attempt_id == attempt(name)]

    def first_tokens(self, name: str) -> FirstTokens:
        (message,) = self.messages(name)
        assert isinstance(message, FirstTokens)
        return message


def prompt(
    name: str,
    token_ids: tuple[int, ...],
    *,
    prefill_try: int = 0,
    first_missing_token: int = 0,
    choices: tuple[int, ...] = (0,),
    priority: int = 0,
    deadline_s: float = 60.0,
    sampling: SamplingParams | None = None,
    salt: bytes = b"",
    tenant: str = "",
) -> Prefill:
    work = Work(
        attempt(name),
        token_ids,
        num_prompt_tokens=len(token_ids),
        sampling=sampling or SamplingParams(seed=1, max_tokens=8),
        choices=choices,
        priority=priority,
        cache_salt=salt,
        deadline_s=deadline_s,
        tenant=tenant,
    )
    return Prefill(work, prefill_try, DECODE, "d0:1", first_missing_token)


def failed_result(plan: StepPlan, nan: set[int], token_id: int = 3) -> StepResult:
    """A finished step in which the rows of `nan` were not finite."""
    rows = [
        SequenceResult(s.sequence_id, error="not finite")
        if s.sequence_id in nan
        else SequenceResult(s.sequence_id, tuple((SampledToken(token_id),) for _ in s.samples))
        for s in plan.sequences
        if s.samples
    ]
    return StepResult(plan.step_id, tuple(rows), 0.01)
