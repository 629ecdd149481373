"""A finished request as OpenTelemetry spans, one per phase, made by the SDK with the times that the router measured.

    pdserve.generate (router)
      route | prefill_queue, prefill (prefill worker) | kv_transfer, decode_queue, decode (decode worker)

All of them come from the router's record, on the router's clock: the workers' clocks are never compared. The transfer
begins while the prefill still runs; the other phases follow one another. No prompt text is in any of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

SCOPE = "pdserve"
MAX_WORKERS = 1024
_MAX_EVENTS = 128
_w3c = TraceContextTextMapPropagator()

# Name, time on the trace's clock in ns, attributes.
Event = tuple[str, int, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Origin:
    """Which router made the spans, and for which model."""

    router_id: str
    model: str
    version: str


@dataclass(frozen=True, slots=True)
class _Trace:
    """A request's root span, as a context for the others."""

    context: Context
    started_ns: int

    def at(self, seconds: float) -> int:
        return self.started_ns + round(seconds * 1e9)


class SpanMaker:
    """Makes the spans of requests and gives them to `processor`. A trace that the client does not sample has none."""

    def __init__(self, origin: Origin, processor: SpanProcessor) -> None:
        self._origin = origin
        self._processor = processor
        self._tracer = lru_cache(MAX_WORKERS)(self._new_tracer)

    def make(self, record: Mapping[str, Any], ended_ns: int) -> bool:
        """All spans of a record that ended at `ended_ns`; False when it is not sampled."""
        started_ns = ended_ns - round(record["timings"]["wall_s"] * 1e9)
        parent = _w3c.extract({"traceparent": str(record.get("trace_parent", ""))}, context=Context())
        tracer = self._tracer("pdserve-router", self._origin.router_id)
        root = tracer.start_span(
            "pdserve.generate", parent, SpanKind.SERVER, self._about(record), start_time=started_ns
        )
        if not root.is_recording():
            return False
        trace = _Trace(set_span_in_context(root, Context()), started_ns)
        if record["num_completion_tokens"]:
            root.add_event("first_token", timestamp=trace.at(record["timings"]["time_to_first_token_s"]))
        is_failed = record["status"] == "failed"
        root.set_status(Status(StatusCode.ERROR, record["error"]) if is_failed else Status(StatusCode.OK))
        self._phases(record, trace, tracer)
        root.end(ended_ns)
        return True

    def _phases(self, record: Mapping[str, Any], trace: _Trace, router: Tracer) -> None:
        """A phase that took no time has no span."""
        timings = record["timings"]
        prefill, decode = self._workers(record["attempts"])
        route_end = timings["route_s"]
        queue_end = route_end + timings["prefill_queue_s"]
        prefill_end = queue_end + timings["prefill_s"]
        kv_end = prefill_end + timings["kv_exposed_s"]
        ready_end = kv_end + timings["decode_queue_s"]
        kv_start = max(0.0, kv_end - timings["kv_transfer_s"])
        _span(router, trace, "route", (0.0, route_end), _decision_events(record["decisions"], trace))
        _span(prefill, trace, "prefill_queue", (route_end, queue_end))
        _span(prefill, trace, "prefill", (queue_end, prefill_end), _chunk_events(timings["prefill_chunks"], trace))
        transfer = {f"pdserve.kv.{name}": timings[f"kv_{name}"] for name in ("bytes", "chunks", "exposed_s")}
        _span(decode, trace, "kv_transfer", (kv_start, kv_end), _tick_events(timings["kv_ticks"], trace), transfer)
        _span(decode, trace, "decode_queue", (kv_end, ready_end))
        _span(decode, trace, "decode", (ready_end, timings["wall_s"]))

    def _workers(self, attempts: Sequence[Mapping[str, Any]]) -> tuple[Tracer, Tracer]:
        """Who did the prefill and who the decoding, of the last attempt."""
        last: Mapping[str, Any] = max(attempts, key=lambda attempt: int(attempt["attempt"]), default={})
        decode = self._tracer("pdserve-decode", str(last.get("decode_worker", "")))
        prefill = self._tracer("pdserve-prefill", str(last.get("prefill_worker", "")))
        return (decode if last.get("is_local") else prefill), decode

    def _about(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Attribute names are those of the GenAI conventions, and vLLM's where these have none."""
        timings = record["timings"]
        error = {"error.type": record["error"]} if record["error"] else {}
        return error | {
            "gen_ai.request.model": self._origin.model,
            "gen_ai.response.id": record["request_id"],
            "gen_ai.usage.input_tokens": record["num_prompt_tokens"],
            "gen_ai.usage.output_tokens": record["num_completion_tokens"],
            "gen_ai.latency.time_to_first_token": timings["time_to_first_token_s"],
            "gen_ai.latency.time_in_queue": timings["prefill_queue_s"],
            "gen_ai.latency.e2e": timings["wall_s"],
            "pdserve.cached_tokens": record["num_cached_tokens"],
            "pdserve.retries": record["num_retries"],
        }

    def _new_tracer(self, service: str, instance: str) -> Tracer:
        version = self._origin.version
        about = {"service.name": service, "service.instance.id": instance, "service.version": version}
        provider = TracerProvider(resource=Resource(about), shutdown_on_exit=False)
        provider.add_span_processor(self._processor)
        return provider.get_tracer(SCOPE, version)


def _span(
    tracer: Tracer,
    trace: _Trace,
    name: str,
    phase_s: tuple[float, float],
    events: Sequence[Event] = (),
    attributes: Mapping[str, Any] | None = None,
) -> None:
    start_s, end_s = phase_s
    if end_s <= start_s:
        return
    span = tracer.start_span(name, trace.context, attributes=attributes, start_time=trace.at(start_s))
    for event_name, at_ns, about in events[:_MAX_EVENTS]:
        span.add_event(event_name, about, at_ns)
    span.end(trace.at(end_s))


def _chunk_events(chunks: Sequence[Sequence[float]], trace: _Trace) -> list[Event]:
    return [
        ("prefill_chunk", trace.at(end_s), {"num_tokens": int(num_tokens), "duration_s": end_s - start_s})
        for start_s, end_s, num_tokens in chunks
    ]


def _tick_events(ticks: Sequence[Sequence[float]], trace: _Trace) -> list[Event]:
    names = ("layer_start", "layer_end", "num_tokens")
    return [("kv_chunk", trace.at(at_s), dict(zip(names, map(int, numbers), strict=True))) for at_s, *numbers in ticks]


def _decision_events(decisions: Sequence[Mapping[str, Any]], trace: _Trace) -> list[Event]:
    names = ("role", "chosen", "why")
    return [("decision", trace.at(each["at_s"]), {name: each[name] for name in names}) for each in decisions]
