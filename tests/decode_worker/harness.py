"""A decode core with a scripted receiver and hand-driven steps. Checks every invariant after every event."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from common.engine.contract.executor import StepFinished
from common.engine.contract.kv_spec import first_token_needed
from common.engine.kv.block_pool import BlockPool
from common.engine.scheduling.block_tables import PoolGroup
from common.engine.scheduling.scheduler import Limits
from common.values.ids import AttemptId, RouterId, TransferId, WorkerRef
from common.values.messages import AttemptFailed, Granted, HandoffReport, Refused, Reserve, TokenBatch, TransferFailed
from common.values.request import FinishReason, SampledToken, SamplingParams, TokenEvent, Work
from common.worker.core import WorkerCore
from common.worker.events import MessageReceived
from decode_worker.core import DecodeCore
from kvtransfer.events import (
    AttemptReleased,
    CancelAnnounced,
    Chunk,
    ChunkWritten,
    ExpectationWithdrawn,
    FinishAnnounced,
    FirstToken,
    ReceiverEffect,
    ReceiverEvent,
    TransferExpected,
    TransferFailedLocally,
    TransferOutcome,
    TransferReceived,
)
from tests.core_bench import ROUTER, CoreBench, attempt
from tests.simkit.fake_engine import contents, expected_output

PREFILL = WorkerRef("p0", "1")
CHUNK = Chunk(0, 0, 1, 0, 1, 1)
Answer = Granted | Refused | TokenBatch | HandoffReport | TransferFailed | AttemptFailed


class ScriptedReceiver:
    """FinishAnnounced completes, CancelAnnounced fails a transfer; if `is_writing`, ChunkWritten ends a withdrawal."""

    def __init__(self) -> None:
        self.expected: dict[AttemptId, TransferExpected] = {}
        self.withdrawn: set[AttemptId] = set()
        self.is_writing = False

    def handle(self, event: ReceiverEvent, now_s: float) -> Sequence[ReceiverEffect]:
        match event:
            case TransferExpected(attempt_id):
                assert attempt_id not in self.expected
                assert attempt_id not in self.withdrawn
                self.expected[attempt_id] = event
            case ExpectationWithdrawn(attempt_id):
                del self.expected[attempt_id]
                if not self.is_writing:
                    return [AttemptReleased(attempt_id)]
                self.withdrawn.add(attempt_id)
            case FinishAnnounced(_, transfer_id) if self.expected.pop(transfer_id.attempt_id, None):
                return [TransferReceived(transfer_id, event.tokens, 1000, 4, 0.5, 0.1)]
            case CancelAnnounced(_, transfer_id, reason) if transfer_id.attempt_id in self.expected:
                return [TransferFailedLocally(transfer_id, TransferOutcome.CANCELLED, reason)]
            case ChunkWritten(transfer_id) if transfer_id.attempt_id in self.withdrawn:
                self.withdrawn.remove(transfer_id.attempt_id)
                return [AttemptReleased(transfer_id.attempt_id)]
        return []

    def handle_deadline(self, now_s: float) -> Sequence[ReceiverEffect]:
        return []

    def next_deadline_s(self) -> float | None:
        return None

    def check_invariants(self) -> None:
        pass


class Bench(CoreBench):
    """`sent` holds what is in `Answer`."""

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 16,
        budget: int = 64,
        max_num_seqs: int = 8,
        max_num_waiting: int = 8,
        reservation_timeout_s: float = 30.0,
        gap_budget_s: float = 0.0,
        groups: Sequence[PoolGroup] | None = None,
        max_draft_tokens: int = 0,
    ) -> None:
        groups = groups or [PoolGroup(BlockPool(num_blocks, block_size))]
        self.receiver = ScriptedReceiver()
        limits = Limits(budget, max_num_seqs, max_num_waiting, gap_budget_s, max_draft_tokens)
        self.role = DecodeCore(groups, self.receiver, limits, {"model": "m"}, reservation_timeout_s)
        super().__init__(WorkerCore(self.role))

    # ---- events -------------------------------------------------------------------------------------

    def reserve(self, work: Work, local: int = 0, router_id: RouterId = ROUTER) -> list[Any]:
        return self.handle(MessageReceived(router_id, Reserve(work, local)))

    def deliver(self, work: Work, prefill_try: int = 0) -> list[Any]:
        """The prefill worker's part: the missing KV is in the blocks, the first tokens are announced."""
        expected = self.receiver.expected[work.attempt_id]
        values = contents(work.token_ids)
        for window, kv, table in zip(self.runner.windows, self.runner.kvs, expected.block_tables, strict=True):
            first_token = max(expected.first_token, first_token_needed(expected.num_tokens, window))
            for position in range(first_token, expected.num_tokens):
                kv.write(table, position, values[position])
        first = tuple(FirstToken(c, SampledToken(expected_output(work, c)[0])) for c in work.choices)
        transfer_id = TransferId(work.attempt_id, prefill_try)
        return self.handle(FinishAnnounced(PREFILL, transfer_id, 4, first))

    def lose_transfer(self, name: str, prefill_try: int = 0) -> list[Any]:
        return self.handle(CancelAnnounced(PREFILL, TransferId(attempt(name), prefill_try), "gone"))

    def finish_writing(self, name: str) -> list[Any]:
        return self.handle(ChunkWritten(TransferId(attempt(name), 0), 0))

    def start(self, work: Work) -> None:
        """Reserve and deliver at once."""
        self.reserve(work)
        assert isinstance(self.sent[-1], Granted), self.sent[-1]
        self.deliver(work)

    def step(self, seconds: float = 0.01) -> list[Any]:
        result = self.runner.run(self._take_plan(seconds))
        return self.handle(StepFinished(replace(result, duration_s=seconds)))

    # ---- what came out ------------------------------------------------------------------------------

    def messages(self, name: str) -> list[Answer]:
        """Everything but tokens that was said of an attempt."""
        answers = [message for message in self.sent if not isinstance(message, TokenBatch)]
        return [message for message in answers if message.attempt_id == attempt(name)]

    def events(self, name: str, number: int = 0) -> Iterator[TokenEvent]:
        for batch in self.sent:
            if isinstance(batch, TokenBatch):
                for tokens in batch.attempts:
                    if tokens.attempt_id == attempt(name, number):
                        yield from tokens.tokens

    def output(self, name: str, choice: int = 0, number: int = 0) -> list[int]:
        """The tokens of one choice; asserts that positions follow one another and that nothing follows the finish."""
        events = [event for event in self.events(name, number) if event.choice_idx == choice]
        positions = [event.position for event in events]
        assert positions == list(
            range(positions[0] if positions else 0, (positions[0] if positions else 0) + len(events))
        )
        assert all(event.finish_reason is None for event in events[:-1])
        return [event.token.token_id for event in events]

    def finish_reason(self, name: str, choice: int = 0) -> FinishReason | None:
        return [event for event in self.events(name) if event.choice_idx == choice][-1].finish_reason


def job(
    name: str,
    token_ids: tuple[int, ...],
    max_tokens: int = 8,
    *,
    number: int = 0,
    choices: tuple[int, ...] = (0,),
    priority: int = 0,
    deadline_s: float = 600.0,
    num_prompt_tokens: int | None = None,
    sampling: SamplingParams | None = None,
    tenant: str = "",
) -> Work:
    return Work(
        attempt(name, number),
        token_ids,
        num_prompt_tokens=len(token_ids) if num_prompt_tokens is None else num_prompt_tokens,
        sampling=sampling or SamplingParams(seed=1, max_tokens=max_tokens),
        choices=choices,
        priority=priority,
        deadline_s=deadline_s,
        tenant=tenant,
    )
