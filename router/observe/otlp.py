"""Sends traces to a collector: OTLP over HTTP, as JSON, in batches, off the event loop. Owns the queue.

A collector that is slow or away costs traces, never a request: the queue is bounded, and what it cannot take is
counted and dropped.
"""

import asyncio
import os
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

import msgspec

from common.telemetry.logs import get_logger
from router.observe.request_metrics import RouterMetrics
from router.observe.spans import Json, SpanMaker

MAX_QUEUED = 2048
MAX_BATCH = 128
BATCH_INTERVAL_S = 0.5
_TIMEOUT_S = 5.0
_FLUSH_LIMIT_S = 2.0
DROPPED = "pdserve_traces_dropped"
_encoder = msgspec.json.Encoder()


def headers_of(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What OpenTelemetry's own variable says to send along, a collector's key for instance."""
    pairs = (pair.partition("=") for pair in environ.get("OTEL_EXPORTER_OTLP_HEADERS", "").split(",") if "=" in pair)
    return {name.strip(): unquote(value.strip()) for name, _, value in pairs}


class OtlpExporter:
    """Takes records of ended requests with `add`, sends them while `run` runs."""

    def __init__(self, endpoint: str, spans: SpanMaker, metrics: RouterMetrics, headers: Mapping[str, str]) -> None:
        self._endpoint = endpoint
        self._spans = spans
        self._metrics = metrics
        self._headers = {"content-type": "application/json", **headers}
        self._queue: deque[list[Json]] = deque()
        self._has_more = asyncio.Event()
        self._is_failing = False

    def add(self, record: Mapping[str, Any]) -> None:
        """A request has ended, now."""
        spans = self._spans.spans_of(record, time.time_ns())
        if not spans:
            return
        if len(self._queue) >= MAX_QUEUED:
            self._metrics.inc(DROPPED)
            return
        self._queue.append(spans)
        self._has_more.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._has_more.wait()
            await asyncio.sleep(BATCH_INTERVAL_S)
            await self._send_batch()

    async def flush(self) -> None:
        """Send what is left, within a short time."""
        try:
            async with asyncio.timeout(_FLUSH_LIMIT_S):
                while self._queue:
                    await self._send_batch()
        except TimeoutError:
            self._metrics.inc(DROPPED, len(self._queue))

    async def _send_batch(self) -> None:
        batch = [self._queue.popleft() for _ in range(min(MAX_BATCH, len(self._queue)))]
        if not self._queue:
            self._has_more.clear()
        if not batch:
            return
        body = _encoder.encode({"resourceSpans": [resource for spans in batch for resource in spans]})
        problem = await asyncio.to_thread(_post, self._endpoint, body, self._headers)
        if problem:
            self._metrics.inc(DROPPED, len(batch))
        self._note(problem)

    def _note(self, problem: str) -> None:
        """One line when it begins to fail and one when it works again."""
        if bool(problem) == self._is_failing:
            return
        self._is_failing = bool(problem)
        if problem:
            get_logger().warning("traces_not_taken", endpoint=self._endpoint, reason=problem)
        else:
            get_logger().info("traces_taken_again", endpoint=self._endpoint)


def _post(url: str, body: bytes, headers: Mapping[str, str]) -> str:
    """Empty when the collector took it, else why not."""
    try:
        request = urllib.request.Request(url, body, dict(headers), method="POST")
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S):
            return ""
    except (urllib.error.URLError, OSError, ValueError) as error:
        return str(error)
