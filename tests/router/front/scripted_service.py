"""A service that answers as a test scripts it. It keeps the contract of `GenerationService`, cancellation included."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from common.cluster.prefix_index.stats import WorkerIndexStats
from common.cluster.reports import LoadingWorker, RouterReport
from common.values.errors import PdserveError
from common.values.ids import RequestId
from common.values.messages import Role, WorkerState
from common.values.request import FinishReason, SampledToken, TokenEvent
from router.core.generation import (
    Accepted,
    Failed,
    Finished,
    GenerationEvent,
    GenerationRequest,
    RequestTimings,
    Tokens,
)
from router.front.service_protocol import ClusterState, JsonObject, Readiness, WorkerView
from router.observe.event_log import EventLog
from router.observe.recent import RecentView, TransferRate

TIMINGS = RequestTimings(
    route_s=0.001,
    prefill_queue_s=0.002,
    prefill_s=0.03,
    kv_transfer_s=0.02,
    kv_exposed_s=0.004,
    decode_queue_s=0.005,
    decode_s=0.1,
    time_to_first_token_s=0.033,
    wall_s=0.142,
    kv_bytes=4096,
    kv_chunks=3,
    num_retries=1,
)

RECENT = RecentView(
    window_s=60.0,
    ttft_p50_s=0.0421,
    ttft_p99_s=0.318,
    itl_p50_s=0.0113,
    itl_p99_s=0.0452,
    num_finished=128,
    num_failed=1,
    num_retries=2,
    error_rate=0.0078,
    retry_rate=0.0156,
    prefix_hit_rate=0.62,
    exposed_share=0.085,
    prompt_tokens_per_s=5210.0,
    generation_tokens_per_s=812.5,
    transfers=(TransferRate("prefill-0", "decode-0", 48.2e6, 120),),
)


class Pause:
    """In a script: nothing more comes until the request is cancelled."""


Script = Sequence[GenerationEvent | Pause]


def tokens(choice_ids: Sequence[Sequence[int]], reason: FinishReason | None = FinishReason.LENGTH) -> list[Tokens]:
    """A step per position: one token of each choice that still has one; the last of each carries `reason`."""
    steps = []
    for position in range(max(map(len, choice_ids))):
        events = [
            TokenEvent(idx, position, _sampled(ids[position]), reason if position == len(ids) - 1 else None)
            for idx, ids in enumerate(choice_ids)
            if position < len(ids)
        ]
        steps.append(Tokens(tuple(events)))
    return steps


def accepted(request: GenerationRequest, num_cached_tokens: int = 0) -> Accepted:
    return Accepted("prefill-0", "decode-0", len(request.token_ids), num_cached_tokens)


def answer(
    request: GenerationRequest, token_ids: Sequence[int], reason: FinishReason | None = FinishReason.LENGTH
) -> list[GenerationEvent]:
    """A whole answer: the same tokens for every choice."""
    steps = tokens([token_ids] * request.num_choices, reason)
    num_tokens = len(token_ids) * request.num_choices
    return [accepted(request, 3), *steps, Finished(len(request.token_ids), num_tokens, 3, TIMINGS)]


@dataclass
class ScriptedService:
    """`script` maps a request to its events. What was asked of it is kept for the test to look at."""

    script: Callable[[GenerationRequest], Script]
    ready: Readiness = field(default_factory=lambda: Readiness(is_ready=True))
    submitted: list[GenerationRequest] = field(default_factory=list)
    cancelled: list[RequestId] = field(default_factory=list)
    stopped: list[tuple[RequestId, int]] = field(default_factory=list)
    drained: list[tuple[str, float]] = field(default_factory=list)
    seen: RecentView = field(default_factory=lambda: RECENT)
    router_pid: int = 11
    other_routers: tuple[RouterReport, ...] = ()
    loading: tuple[LoadingWorker, ...] = ()
    index_stats: tuple[WorkerIndexStats, ...] | None = None
    events: EventLog = field(default_factory=lambda: EventLog(time.monotonic))
    _cancellations: dict[RequestId, asyncio.Event] = field(default_factory=dict)

    async def submit(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        self.submitted.append(request)
        cancellation = self._cancellations[request.request_id] = asyncio.Event()
        for event in deque(self.script(request)):
            if isinstance(event, Pause):
                await cancellation.wait()
            if cancellation.is_set():
                return
            assert not isinstance(event, Pause)
            if isinstance(event, Finished | Failed):
                del self._cancellations[request.request_id]
            yield event
            await asyncio.sleep(0)

    def stop_choice(self, request_id: RequestId, choice_idx: int) -> None:
        self.stopped.append((request_id, choice_idx))

    def cancel(self, request_id: RequestId) -> None:
        if request_id in self._cancellations:
            self.cancelled.append(request_id)
            self._cancellations.pop(request_id).set()

    def readiness(self) -> Readiness:
        return self.ready

    def state(self) -> ClusterState:
        return ClusterState((_worker("prefill-0", Role.PREFILL), _worker("decode-0", Role.DECODE)), num_queued=2)

    def recent(self) -> RecentView:
        return self.seen

    def request_record(self, request_id: RequestId) -> JsonObject | None:
        known = [request for request in self.submitted if request.request_id == request_id]
        return {"request_id": request_id, "num_prompt_tokens": len(known[0].token_ids)} if known else None

    def request_records(self, limit: int) -> list[JsonObject]:
        return [{"request_id": request.request_id} for request in self.submitted[::-1][:limit]]

    def drain_worker(self, worker_id: str, grace_s: float) -> bool:
        self.drained.append((worker_id, grace_s))
        return worker_id in {"prefill-0", "decode-0"}


def always(token_ids: Sequence[int], reason: FinishReason | None = FinishReason.LENGTH) -> ScriptedService:
    """Answers every request with the same tokens."""
    return ScriptedService(lambda request: answer(request, token_ids, reason))


def failing(error: PdserveError, before: Callable[[GenerationRequest], Script] = lambda _: ()) -> ScriptedService:
    """Fails every request with `error`, after the events of `before`."""
    return ScriptedService(lambda request: [*before(request), Failed(error)])


def _sampled(token_id: int) -> SampledToken:
    return SampledToken(token_id, -0.5, ((token_id, -0.5), (token_id + 1, -2.0)))


def _worker(worker_id: str, role: Role) -> WorkerView:
    return WorkerView(
        worker_id=worker_id,
        incarnation="i1",
        role=role,
        state=WorkerState.READY,
        pid=4711,
        address="127.0.0.1:1",
        running=1,
        waiting=0,
        waiting_uncached_tokens=0,
        kv_blocks_total=10,
        kv_blocks_used=1,
        kv_blocks_cached=2,
        kv_blocks_free=6,
        kv_blocks_held=1,
        block_size=16,
        kv_dtype="float32",
    )
