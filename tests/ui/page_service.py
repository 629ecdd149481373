"""A cluster that exists only on paper, for the page to show; and a server for it on a thread of its own."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from common.cluster.prefix_index.stats import WorkerIndexStats
from common.values.ids import RequestId
from common.values.messages import Role, WorkerState
from router.front.service_protocol import ClusterState, JsonObject, RankView, WorkerView
from router.observe.recent import TransferRate
from router.tenants.access import Access
from tests.router.front.http_rig import HttpRig, http_rig, ids, open_access
from tests.router.front.scripted_service import RECENT, ScriptedService, answer

ResultT = TypeVar("ResultT")
LONG_ID = "chatcmpl-0123456789abcdef0123456789abcdef"
HOSTILE_ID = "<img src=x onerror=alert(1)>"
TIMINGS: dict[str, object] = {
    "route_s": 0.004,
    "prefill_queue_s": 0.020,
    "prefill_s": 0.300,
    "kv_transfer_s": 0.280,
    "kv_exposed_s": 0.016,
    "kv_transport": "shm",
    "kv_link_bytes_per_s": 1.25e9,
    "decode_queue_s": 0.010,
    "decode_s": 0.650,
    "time_to_first_token_s": 0.330,
    "wall_s": 1.0,
    "kv_bytes": 23_592_960,
    "kv_chunks": 12,
    "num_retries": 1,
    "prefill_chunks": [[0.024, 0.124, 512], [0.124, 0.224, 512], [0.224, 0.324, 476]],
    "kv_ticks": [[0.06 + 0.0254 * idx, idx % 3 * 10, idx % 3 * 10 + 10, 512] for idx in range(12)],
}


def worker(worker_id: str, role: Role, *, used: int, held: int, cached: int, **fields: Any) -> WorkerView:
    """1000 blocks, of which the rest is free."""
    base = WorkerView(
        worker_id=worker_id, incarnation="i1", role=role, state=WorkerState.READY, pid=4711, address="10.0.0.1:1",
        running=3, waiting=1, waiting_uncached_tokens=0, kv_blocks_total=1000, kv_blocks_used=used,
        kv_blocks_cached=cached, kv_blocks_free=1000 - used - held - cached, kv_blocks_held=held, block_size=16,
        device="cuda:0",
    )  # fmt: skip
    return replace(base, **fields)


RANKS = tuple(RankView(idx, 4711 + idx, "cpu", 5.2 * (idx == 2)) for idx in range(3))
WORKERS = (
    worker("prefill-0", Role.PREFILL, used=210, held=90, cached=400, waiting_uncached_tokens=1536, ranks=RANKS),
    worker("prefill-1", Role.PREFILL, used=60, held=0, cached=150),
    worker("decode-0", Role.DECODE, used=520, held=40, cached=300, running=17),
    worker("decode-1", Role.DECODE, used=130, held=0, cached=90, num_preemptions=2),
    worker("decode-2", Role.DECODE, used=10, held=0, cached=0, running=1, state=WorkerState.DRAINING),
)
TRANSFERS = (
    TransferRate("prefill-0", "decode-0", 480e6, 220),
    TransferRate("prefill-0", "decode-1", 12e6, 25),
    TransferRate("prefill-1", "decode-1", 900e3, 9),
    TransferRate("prefill-1", "decode-0", 0.0, 2),
)


def record(request_id: str, status: str = "finished", **fields: object) -> dict[str, object]:
    """A request as the router remembers it."""
    candidate = {"num_ranks": 3, "load": 0.1, "recent_placements": 0, "last_chosen": 1, "refusal": ""}
    candidates = [
        {"worker_id": "prefill-0", "cost": 0.412, "num_cached_tokens": 512, **candidate},
        {"worker_id": "prefill-1", "cost": 0.655, "num_cached_tokens": 0, **candidate, "refusal": "queue is full"},
    ]
    attempt = {
        "attempt": 0, "phase": "ended", "prefill_worker": "prefill-0#1", "decode_worker": "decode-0#1",
        "prefill_try": 0, "is_local": False, "choices": [0], "num_tokens": 2012, "first_missing_token": 512,
    }  # fmt: skip
    base: dict[str, object] = {
        "request_id": request_id, "status": status, "error": "", "message": "", "age_s": 1.0,
        "num_choices": 5, "num_returned": 2, "num_beams": 6,
        "num_prompt_tokens": 2012, "num_completion_tokens": 64, "num_cached_tokens": 512, "num_retries": 1,
        "adapter": "legal-v2", "num_drafts": 40, "num_accepted_drafts": 31,
        "finish_reasons": ["stop"], "timings": TIMINGS,
        "attempts": [
            {**attempt, "end_reason": "decode-1 lost: silent for 4 s"},
            {**attempt, "attempt": 1, "end_reason": "finished"},
        ],
        "decisions": [
            {"role": "prefill", "attempt": 0, "at_s": 0.004, "chosen": "prefill-0", "why": "lowest cost",
             "candidates": candidates},
        ],
    }  # fmt: skip
    return base | fields


INDEX_STATS = (
    WorkerIndexStats("decode-0", 300, 0.25, "prefill-0", 0.75),
    WorkerIndexStats("prefill-0", 1200, 1.0),
)
RECORDS = (
    record("req-running", "running", num_completion_tokens=0, age_s=0.4),
    record(LONG_ID),
    record("req-failed", "failed", error="worker_lost", message="decode-1 lost: silent for 4 s"),
    record(HOSTILE_ID),
    *(record(f"req-{idx:02}") for idx in range(20)),
)


@dataclass
class PageService(ScriptedService):
    """Shows the cluster above; answers every request with a few tokens."""

    workers: tuple[WorkerView, ...] = WORKERS
    records: tuple[dict[str, object], ...] = RECORDS
    is_broken: bool = False

    def state(self) -> ClusterState:
        if self.is_broken:
            raise RuntimeError("as the test wants it")
        return ClusterState(self.workers, num_queued=4, num_running=21)

    def request_record(self, request_id: RequestId) -> JsonObject | None:
        return next((each for each in self.records if each["request_id"] == request_id), None)

    def request_records(self, limit: int) -> list[JsonObject]:
        return list(self.records[:limit])


def page_service() -> PageService:
    script = lambda request: answer(request, ids("Paris is nice."))  # noqa: E731 - a script is one expression
    service = PageService(script, seen=replace(RECENT, transfers=TRANSFERS), index_stats=INDEX_STATS)
    service.events.add("joined", "decode-0, decode at 127.0.0.1:4000")
    service.events.add("left", "<img src=x>: stream ended")
    return service


class Served:
    """A rig whose loop runs on another thread, so that a blocking browser client can be used."""

    def __init__(self, loop: asyncio.AbstractEventLoop, rig: HttpRig, service: PageService) -> None:
        self._loop = loop
        self.rig = rig
        self.service = service
        self.url = f"{rig.url}/ui/"

    def run(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)


@contextmanager
def served(admin_key: str = "", access: Access | None = None) -> Iterator[Served]:
    """The page over a scripted service, on a real port."""
    started: list[Served] = []
    is_up, stop = threading.Event(), asyncio.Event()

    async def serve() -> None:
        service = page_service()
        async with http_rig(service, access=access or open_access(admin_key)) as rig:
            started.append(Served(asyncio.get_running_loop(), rig, service))
            is_up.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert is_up.wait(60), "the server does not start"
        yield started[0]
    finally:
        if started:
            started[0]._loop.call_soon_threadsafe(stop.set)
        thread.join(60)
