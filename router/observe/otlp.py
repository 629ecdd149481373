"""Sends traces to a collector by OpenTelemetry's SDK: OTLP over HTTP, in batches. Off the event loop: one thread makes
the spans of a request (0.9 ms, Zen 4), the SDK's encodes and sends them.

A collector that is slow or away costs traces, never a request: the queue is bounded, and what it cannot take is
counted and dropped. `OTEL_EXPORTER_OTLP_HEADERS`, `_CERTIFICATE`, `_COMPRESSION` and the like are the SDK's.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.trace import SpanKind

from common.telemetry.logs import get_logger
from router.observe.request_metrics import RouterMetrics
from router.observe.spans import Origin, SpanMaker

MAX_QUEUED = 2048  # requests
BATCH_INTERVAL_S = 0.5
DROPPED = "pdserve_traces_dropped"
_SPANS_PER_REQUEST = 7
_MAX_BATCH = 512  # spans
_TIMEOUT_S = 5.0
_FLUSH_LIMIT_S = 2.0


class TraceExporter:
    """Takes records of ended requests with `add`. Owns the queues and threads; close it."""

    def __init__(self, endpoint: str, origin: Origin, metrics: RouterMetrics) -> None:
        # What it says is said once by us; without a handler it would go to the terminal.
        logging.getLogger("opentelemetry").addHandler(logging.NullHandler())
        self._metrics = metrics
        self._sender = _CountedExporter(endpoint, metrics)
        self._processor = BatchSpanProcessor(
            self._sender,
            max_queue_size=(MAX_QUEUED + 1) * _SPANS_PER_REQUEST,
            schedule_delay_millis=BATCH_INTERVAL_S * 1000,
            max_export_batch_size=_MAX_BATCH,
        )
        self._spans = SpanMaker(origin, self._processor)
        self._maker = ThreadPoolExecutor(1, "trace-spans")
        self._num_added = 0
        self._num_skipped = 0  # without spans; written by the maker's thread alone

    def add(self, record: Mapping[str, Any]) -> None:
        """A request has ended, now."""
        if self._num_added - self._num_skipped - self._sender.num_ended >= MAX_QUEUED:
            self._metrics.inc(DROPPED)
            return
        self._num_added += 1
        self._maker.submit(self._make, record, time.time_ns())

    async def close(self) -> None:
        """Send what is left, within a short time."""
        giving_up = threading.Timer(_FLUSH_LIMIT_S, self._sender.shutdown)
        giving_up.start()
        try:
            await asyncio.to_thread(self._maker.shutdown)
            await asyncio.to_thread(self._processor.shutdown)
        finally:
            giving_up.cancel()

    def _make(self, record: Mapping[str, Any], ended_ns: int) -> None:
        is_sampled = False
        try:
            is_sampled = self._spans.make(record, ended_ns)
        except Exception as error:  # a bug of ours must cost traces alone
            get_logger().error("trace_failed", error_type=type(error).__name__)
        finally:
            self._num_skipped += not is_sampled


class _CountedExporter:
    """The SDK's exporter, which counts what the collector did not take. `export` is called by the SDK's thread."""

    def __init__(self, endpoint: str, metrics: RouterMetrics) -> None:
        self.num_ended = 0  # requests that were sent or given up; written by the SDK's thread alone
        self._endpoint = endpoint
        self._metrics = metrics
        self._inner = OTLPSpanExporter(endpoint, timeout=_TIMEOUT_S)
        self._is_failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._inner.export(spans)
        num_requests = sum(span.kind is SpanKind.SERVER for span in spans)
        if result is not SpanExportResult.SUCCESS:
            self._metrics.inc(DROPPED, num_requests)
        self.num_ended += num_requests
        self._note(is_failing=result is not SpanExportResult.SUCCESS)
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()

    def _note(self, *, is_failing: bool) -> None:
        """One line when it begins to fail and one when it works again."""
        if is_failing and not self._is_failing:
            get_logger().warning("traces_not_taken", endpoint=self._endpoint)
        elif self._is_failing and not is_failing:
            get_logger().info("traces_taken_again", endpoint=self._endpoint)
        self._is_failing = is_failing
