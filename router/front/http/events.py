"""`/admin/v1/events`: the cluster's state as a stream of snapshots, for the page and for `pdserve top`.

Owns the snapshot, which all watchers share: it is made at most once per interval, however many watch.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from common.cluster.prefix_index.stats import WorkerIndexStats
from common.values.errors import Overloaded
from common.values.ids import WorkerRef
from router.front.frontend import Frontend
from router.front.http.admin import AdminHooks
from router.front.http.io import request_id_of
from router.front.http.stream import EventStream, sse_frame

INTERVAL_S = 0.5
MAX_WATCHERS = 64
NUM_REQUESTS = 50
NUM_EVENTS = 50
# Blocks come and go more slowly than people look.
INDEX_INTERVAL_S = 3.0
_KEEP_ALIVE_S = 15.0
_TIMINGS = ("time_to_first_token_s", "wall_s")
_BRIEF = (
    "request_id", "status", "error", "age_s", "num_prompt_tokens", "num_completion_tokens", "num_cached_tokens",
    "num_retries",
)  # fmt: skip


class StateFeed:
    """Snapshots of what `frontend` and its service know."""

    def __init__(self, frontend: Frontend, hooks: AdminHooks) -> None:
        self._frontend = frontend
        self._hooks = hooks
        self._num_watchers = 0
        self._frame = b""
        self._made_s = float("-inf")
        self._index_stats: Sequence[WorkerIndexStats] | None = None
        self._counted_s = float("-inf")
        self._making = asyncio.Lock()

    async def events(self, request: Request) -> Response:
        """A snapshot at once, then one per interval until the client leaves."""
        if self._num_watchers >= MAX_WATCHERS:
            raise Overloaded(f"{MAX_WATCHERS} clients watch already", retry_after_s=INTERVAL_S)
        return EventStream(self._frames(), dict, request_id_of(request), _KEEP_ALIVE_S)

    async def snapshot(self) -> dict[str, object]:
        """What one event says."""
        service, readiness, model = self._frontend.service, self._frontend.readiness(), self._frontend.model
        return {
            "router": {
                "router_id": self._hooks.router_id,
                "version": self._hooks.version,
                "model": model.name,
                "max_model_len": model.max_model_len,
                "is_ready": readiness.is_ready,
                "reasons": readiness.reasons,
            },
            "state": service.state(),
            "pools": None if self._hooks.pool_status is None else await self._hooks.pool_status(),
            "routers": self._hooks.routers(),
            "loading": self._hooks.loading(),
            "index": self._index(),
            "events": service.events.newest(NUM_EVENTS),
            "recent": service.recent(),
            "requests": [brief(record) for record in service.request_records(NUM_REQUESTS)],
        }

    def _index(self) -> Sequence[WorkerIndexStats] | None:
        """What each worker has in the prefix index, as of some seconds ago."""
        now_s = time.monotonic()
        if now_s - self._counted_s >= INDEX_INTERVAL_S:
            workers = self._frontend.service.state().workers
            refs = sorted(WorkerRef(worker.worker_id, worker.incarnation) for worker in workers)
            self._index_stats, self._counted_s = self._hooks.index_stats(refs), now_s
        return self._index_stats

    async def _frames(self) -> AsyncGenerator[bytes, None]:
        self._num_watchers += 1
        try:
            while True:
                yield await self._shared_frame()
                await asyncio.sleep(INTERVAL_S)
        finally:
            self._num_watchers -= 1

    async def _shared_frame(self) -> bytes:
        async with self._making:
            now_s = time.monotonic()
            if now_s - self._made_s >= INTERVAL_S / 2:
                self._frame, self._made_s = sse_frame(await self.snapshot()), now_s
            return self._frame


def brief(record: Mapping[str, Any]) -> dict[str, object]:
    """A line of a list of requests; the whole record has its own endpoint."""
    timings, attempts = record.get("timings", {}), record.get("attempts", ())
    last: Mapping[str, Any] = max(attempts, key=lambda attempt: int(attempt["attempt"]), default={})
    return {
        **{name: record.get(name) for name in _BRIEF},
        **{name: timings.get(name) for name in _TIMINGS},
        "is_local": bool(last.get("is_local")),
        **{role: str(last.get(role, "")).partition("#")[0] for role in ("prefill_worker", "decode_worker")},
    }
