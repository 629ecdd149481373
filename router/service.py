"""The router's shell: joins the core to the workers' streams, the prefix index and the front ends. No decisions here.

Implements `GenerationService`. Owns the core's loop, the directory of workers, the streams
of live requests and the look-ups. Everything runs in one event loop.
"""

import asyncio
import hashlib
import random
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import zip_longest
from typing import assert_never

from common.cluster.protocol import PrefixIndexReader, Registry
from common.cores.core_loop import CoreLoop
from common.telemetry.logs import get_logger
from common.tls.identity import Component, Identity
from common.values.config import RouterConfig
from common.values.errors import InvalidRequest, NoReadyPair, PdserveError, RequestCancelled
from common.values.hashing import block_hashes, hash_root
from common.values.ids import BlockHash, RequestId, RouterId, WorkerRef
from common.values.messages import Role, WorkerInfo, WorkerState, WorkerStats
from router.core.core import RouterCore
from router.core.events import (
    ChoiceStopped,
    Deliver,
    DrainRequested,
    DropWorker,
    EndRequested,
    LookupPrefix,
    NoteHandoff,
    NoteRetry,
    NoteStaleHit,
    PrefixFound,
    PrefixKey,
    RequestSubmitted,
    RouterEffect,
    RouterEvent,
    SendToWorker,
)
from router.core.generation import Failed, Finished, GenerationEvent, GenerationRequest, Tokens
from router.core.router_limits import RouterLimits
from router.core.workers import Worker
from router.front.service_protocol import ClusterState, JsonObject, RankView, Readiness, WorkerView
from router.observe.event_log import EventLog
from router.observe.recent import Recent, RecentView
from router.observe.request_metrics import NullMetrics, RequestMetrics, RouterMetrics
from router.registry import ExpectedRoles, WorkerDirectory

GAUGES_INTERVAL_S = 1.0
MAX_HASH_ROOTS = 1024  # one for each cache salt and adapter in use
_NO_METRICS = NullMetrics()


class GenerationStream(AsyncIterator[GenerationEvent]):
    """What the core delivers and the front end reads. Tokens that wait are joined, so a slow reader costs little."""

    def __init__(self) -> None:
        self._events: deque[GenerationEvent] = deque()
        self._has_news = asyncio.Event()
        self._has_ended = False

    def push(self, event: GenerationEvent) -> None:
        """Add an event; nothing comes after Finished or Failed."""
        assert not self._has_ended, f"{event} after the last event"
        self._has_ended = isinstance(event, Finished | Failed)
        last = self._events[-1] if self._events else None
        if isinstance(event, Tokens) and isinstance(last, Tokens):
            self._events[-1] = Tokens(last.tokens + event.tokens)
        else:
            self._events.append(event)
        self._has_news.set()

    async def __anext__(self) -> GenerationEvent:
        while not self._events:
            if self._has_ended:
                raise StopAsyncIteration
            self._has_news.clear()
            await self._has_news.wait()
        return self._events.popleft()


class RouterService:
    """Start it inside the running loop, close it when done. `wait` raises what broke it, if anything did.

    `on_end` gets the record of each request that has ended; `expected` says which roles wait for a worker that loads.
    """

    def __init__(
        self,
        config: RouterConfig,
        index: PrefixIndexReader,
        registry: Registry,
        metrics: RouterMetrics = _NO_METRICS,
        clock: Callable[[], float] = time.monotonic,
        on_end: Callable[[JsonObject], None] | None = None,
        expected: ExpectedRoles | None = None,
    ) -> None:
        self._index = index
        self._registry = registry
        self._on_end = on_end
        self._metrics = self._recent = Recent(metrics, clock)
        self._request_metrics = RequestMetrics(self._metrics)
        self._clock = clock
        self._core = RouterCore(RouterLimits.of(config))
        self.events = EventLog(clock)
        self._directory = WorkerDirectory(
            registry,
            RouterId(config.router_id),
            self._hear,
            Identity(Component.ROUTER, config.namespace, config.tls),
            *([] if expected is None else [expected]),
        )
        self._streams: dict[RequestId, GenerationStream] = {}
        self._hash_root = lru_cache(MAX_HASH_ROOTS)(_hash_root)
        self._is_closing = False
        self._emptied = asyncio.Event()
        self._started: asyncio.Future[asyncio.TaskGroup] | None = None
        self._loop: CoreLoop[RouterEvent, RouterEffect]
        self._tasks: asyncio.TaskGroup
        self._main: asyncio.Task[None]

    async def start(self) -> None:
        """Begin to follow the registry. Requests may be submitted at once; they wait for workers for a while."""
        self._loop = CoreLoop(self._core, self._perform, self._clock)
        self._started = asyncio.get_running_loop().create_future()
        self._main = asyncio.create_task(self._run(), name="router")
        self._tasks = await self._started

    async def wait(self) -> None:
        """Return when the service is closed; raise when it broke."""
        try:
            await asyncio.shield(self._main)
        except asyncio.CancelledError:
            if not self._main.cancelled():
                raise

    async def close(self, grace_s: float = 0.0) -> None:
        """Refuse new requests, let the others finish within the grace, end the rest with an error."""
        self._is_closing = True
        try:
            async with asyncio.timeout(grace_s):
                while self._streams:
                    self._emptied.clear()
                    await self._emptied.wait()
        except TimeoutError:
            pass
        for request_id in list(self._streams):
            self._post(EndRequested(request_id, NoReadyPair("the router is shutting down", retry_after_s=1.0)))
        self._main.cancel()
        await asyncio.gather(self._main, return_exceptions=True)
        self._loop.close()

    # ---- requests -----------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        """Run a request; refusals are Failed events. See `GenerationService`."""
        stream = GenerationStream()
        error = self._submit_error(request)
        if error is not None:
            stream.push(Failed(error))
            return stream
        self._streams[request.request_id] = stream
        self._request_metrics.submitted(request, self._clock())
        if request.adapter:
            self._metrics.inc("pdserve_adapter_requests", adapter=request.adapter_name)
        self._post(RequestSubmitted(request, _random_first_attempt()))
        return stream

    def stop_choice(self, request_id: RequestId, choice_idx: int) -> None:
        self._post(ChoiceStopped(request_id, choice_idx))

    def cancel(self, request_id: RequestId) -> None:
        if request_id in self._streams:
            self._post(EndRequested(request_id, RequestCancelled("the request was cancelled")))

    def _submit_error(self, request: GenerationRequest) -> PdserveError | None:
        if self._is_closing:
            return NoReadyPair("the router is shutting down", retry_after_s=1.0)
        if request.request_id in self._streams:
            return InvalidRequest(f"request_id {request.request_id!r} is in use", param="request_id")
        return None

    # ---- for people ---------------------------------------------------------------------------------

    def readiness(self) -> Readiness:
        if self._is_closing:
            return Readiness(is_ready=False, reasons=("the router is shutting down",))
        if self._core.has_ready_pair:
            return Readiness(is_ready=True)
        ready = Counter(worker.info.role for worker in self._core.workers if worker.is_ready)
        missing = tuple(f"no {role} worker is ready" for role in Role if not ready[role])
        reasons = missing or ("no prefill worker pairs with a decode worker",)
        return Readiness(is_ready=False, reasons=(*filter(None, [self._registry.problem]), *reasons))

    def state(self) -> ClusterState:
        workers = tuple(_view(worker, self._clock()) for worker in self._core.workers)
        return ClusterState(workers, self._core.num_queued, len(self._core.request_ids) - self._core.num_queued)

    def recent(self) -> RecentView:
        return self._recent.view()

    def request_record(self, request_id: RequestId) -> JsonObject | None:
        return self._core.record(request_id, self._clock())

    def request_records(self, limit: int) -> Sequence[JsonObject]:
        return self._core.newest_records(limit, self._clock())

    def drain_worker(self, worker_id: str, grace_s: float) -> bool:
        is_known = any(worker.ref.worker_id == worker_id for worker in self._core.workers)
        if is_known:
            self.events.add("drain", f"{worker_id} is to finish what it has within {grace_s:g} s, and end")
            self._post(DrainRequested(worker_id, grace_s))
        return is_known

    # ---- effects ------------------------------------------------------------------------------------

    def _post(self, event: RouterEvent) -> None:
        self._loop.post(event)

    def _hear(self, event: RouterEvent) -> None:
        """From a worker's stream, or of it."""
        self.events.note(event)
        self._post(event)

    def _perform(self, effect: RouterEffect) -> None:
        match effect:
            case Deliver(request_id, event):
                self._deliver(request_id, event)
            case SendToWorker(worker, message):
                self._directory.send(worker, message)
            case LookupPrefix():
                self._look_up(effect)
            case DropWorker(worker, reason, is_final):
                self._directory.drop(worker, reason, is_final=is_final)
            case NoteRetry(request_id, lost, reason):
                self._metrics.inc("pdserve_request_retries", reason=lost)
                self.events.add("retry", f"{request_id}: {lost} lost, {reason}")
                get_logger().warning("request_retried", request_id=request_id, lost=lost, reason=reason)
            case NoteStaleHit(worker, num_promised, num_cached):
                self._metrics.inc("pdserve_index_stale_hits")
                get_logger().info(
                    "index_stale_hit", worker=str(worker), num_promised=num_promised, num_cached=num_cached
                )
            case NoteHandoff(prefill, decode, num_bytes):
                self._recent.transferred(prefill.worker_id, decode.worker_id, num_bytes)
            case _:
                assert_never(effect)

    def _deliver(self, request_id: RequestId, event: GenerationEvent) -> None:
        self._request_metrics.delivered(request_id, event, self._clock())
        self._streams[request_id].push(event)
        if isinstance(event, Finished | Failed):
            del self._streams[request_id]
            _log_end(request_id, event)
            self._trace_end(request_id)
            if not self._streams:
                self._emptied.set()

    def _trace_end(self, request_id: RequestId) -> None:
        """Hand on what is remembered of a request; of one that was refused there is nothing."""
        record = self.request_record(request_id) if self._on_end is not None else None
        if record is not None and self._on_end is not None:
            self._on_end(record)

    def _look_up(self, lookup: LookupPrefix) -> None:
        started_s = self._clock()
        root = self._hash_root(lookup.key, lookup.cache_salt, lookup.adapter)
        hashes = block_hashes(lookup.token_ids, lookup.key.block_size, root)
        known = self._index.known_prefix(hashes, lookup.workers)
        if known is not None:
            self._found(lookup, known, started_s)
        else:
            self._tasks.create_task(self._ask_index(lookup, hashes, started_s))

    async def _ask_index(self, lookup: LookupPrefix, hashes: Sequence[BlockHash], started_s: float) -> None:
        self._found(lookup, await self._index.longest_prefix(hashes, lookup.workers), started_s)

    def _found(self, lookup: LookupPrefix, found: Mapping[WorkerRef, int], started_s: float) -> None:
        self._metrics.observe("pdserve_index_lookup_seconds", self._clock() - started_s)
        self._post(PrefixFound(lookup.attempt_id, lookup.key, tuple(found.items())))

    # ---- tasks --------------------------------------------------------------------------------------

    async def _run(self) -> None:
        assert self._started is not None
        async with asyncio.TaskGroup() as tasks:
            self._started.set_result(tasks)
            tasks.create_task(self._directory.run())
            tasks.create_task(self._report_gauges())
            await asyncio.shield(self._loop.failed)  # ends the service when the core hit a bug

    async def _report_gauges(self) -> None:
        while True:
            self._set_gauges()
            await asyncio.sleep(GAUGES_INTERVAL_S)

    def _set_gauges(self) -> None:
        state = self.state()
        self._metrics.set("pdserve_requests_running", state.num_running)
        self._metrics.set("pdserve_requests_waiting", state.num_queued)
        counts = Counter((worker.role, worker.state) for worker in state.workers)
        for role in Role:
            for worker_state in WorkerState:
                count = counts[role, worker_state]
                self._metrics.set("pdserve_workers", count, worker_role=role, state=worker_state)


def _hash_root(key: PrefixKey, cache_salt: bytes, adapter: str) -> BlockHash:
    return hash_root(dict(key.fingerprint.fields), key.block_size, cache_salt, adapter)


def _random_first_attempt() -> int:
    """A number with room for 256 attempts below 2^32, the width of the wire."""
    return random.getrandbits(24) << 8


def _log_end(request_id: RequestId, event: Finished | Failed) -> None:
    if isinstance(event, Failed):
        get_logger().info("request_failed", request_id=request_id, code=event.error.code, reason=event.error.message)
        return
    get_logger().info(
        "request_finished",
        request_id=request_id,
        num_prompt_tokens=event.num_prompt_tokens,
        num_completion_tokens=event.num_completion_tokens,
        num_cached_tokens=event.num_cached_tokens,
        wall_s=round(event.timings.wall_s, 6),
        num_retries=event.timings.num_retries,
    )


def _view(worker: Worker, now_s: float) -> WorkerView:
    info, stats = worker.info, worker.stats
    fields = dict(info.fingerprint.fields)
    return WorkerView(
        worker_id=info.ref.worker_id,
        incarnation=info.ref.incarnation,
        role=info.role,
        state=worker.state,
        pid=info.pid,
        address=worker.address,
        running=stats.num_running,
        waiting=stats.num_waiting,
        waiting_uncached_tokens=stats.num_waiting_uncached_tokens,
        kv_blocks_total=info.num_blocks,
        kv_blocks_used=stats.kv_blocks_used,
        kv_blocks_cached=stats.kv_blocks_cached,
        kv_blocks_free=stats.kv_blocks_free,
        kv_blocks_held=stats.kv_blocks_held,
        block_size=info.block_size,
        pairing_key=hashlib.sha256(repr(sorted(fields.items())).encode()).hexdigest()[:16],
        kv_dtype=fields.get("dtype", ""),
        device=info.device,
        num_preemptions=stats.num_preemptions,
        max_num_seqs=info.max_num_seqs,
        prefill_tokens_per_s=stats.prefill_tokens_per_s,
        step_s=stats.step_s,
        silent_s=max(0.0, now_s - worker.heard_s),
        ranks=tuple(_ranks(info, stats)),
    )


def _ranks(info: WorkerInfo, stats: WorkerStats) -> Iterator[RankView]:
    for rank, (process, silent_s) in enumerate(zip_longest(info.ranks, stats.ranks_silent_s[: len(info.ranks)])):
        yield RankView(rank, process.pid, process.device, silent_s or 0.0)
