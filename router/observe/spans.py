"""A finished request as OpenTelemetry spans, one per phase, as OTLP's JSON has them. Pure: no IO.

    pdserve.generate (router)
      route | prefill_queue, prefill (prefill worker) | kv_transfer, decode_queue, decode (decode worker)

All of them come from the router's record, on the router's clock: the workers' clocks are never compared. The transfer
begins while the prefill still runs; the other phases follow one another. No prompt text is in any of it.
"""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SCOPE = "pdserve"
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_KIND_INTERNAL, _KIND_SERVER = 1, 2
_STATUS_OK, _STATUS_ERROR = 1, 2
_MAX_EVENTS = 128

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Parent:
    """What the client's `traceparent` says; `is_sampled` False: the client does not want this one traced."""

    trace_id: str
    span_id: str
    is_sampled: bool


def parent_of(traceparent: str) -> Parent | None:
    """W3C trace context, any version that begins as the first; None when it is absent or wrong."""
    found = _TRACEPARENT.fullmatch(traceparent.strip())
    if found is None:
        return None
    return Parent(found[1], found[2], is_sampled=bool(int(found[3], 16) & 1))


@dataclass(frozen=True, slots=True)
class Origin:
    """Which router made the spans, and for which model."""

    router_id: str
    model: str
    version: str


class SpanMaker:
    """Makes the spans of requests; ids come from `ids`."""

    def __init__(self, origin: Origin, ids: random.Random) -> None:
        self._origin = origin
        self._ids = ids

    def spans_of(self, record: Mapping[str, Any], ended_ns: int) -> list[Json]:
        """OTLP `resourceSpans` of a record that ended at `ended_ns`; nothing when the client's trace is not sampled."""
        parent = parent_of(str(record.get("trace_parent", "")))
        if parent is not None and not parent.is_sampled:
            return []
        started_ns = ended_ns - round(record["timings"]["wall_s"] * 1e9)
        trace = _Trace(parent.trace_id if parent else self._id(32), self._id(16), started_ns)
        root = self._root(record, trace, parent, ended_ns)
        attempts: Sequence[Mapping[str, Any]] = record["attempts"]
        last: Mapping[str, Any] = max(attempts, key=lambda attempt: int(attempt["attempt"]), default={})
        router, prefill, decode = self._phases(record, trace, is_local=bool(last.get("is_local")))
        instances = (
            ("pdserve-router", self._origin.router_id, [root, *router]),
            ("pdserve-prefill", last.get("prefill_worker", ""), prefill),
            ("pdserve-decode", last.get("decode_worker", ""), decode),
        )
        return [self._resource(name, str(instance), spans) for name, instance, spans in instances if spans]

    def _phases(self, record: Mapping[str, Any], trace: "_Trace", *, is_local: bool) -> tuple[list[Json], ...]:
        """Spans of the router, the prefill worker and the decode worker. A phase that took no time has none."""
        timings = record["timings"]
        route_end = timings["route_s"]
        queue_end = route_end + timings["prefill_queue_s"]
        prefill_end = queue_end + timings["prefill_s"]
        kv_end = prefill_end + timings["kv_exposed_s"]
        ready_end = kv_end + timings["decode_queue_s"]
        kv_start = max(0.0, kv_end - timings["kv_transfer_s"])
        prefill = [
            *self._span(trace, "prefill_queue", route_end, queue_end),
            *self._span(trace, "prefill", queue_end, prefill_end, _chunk_events(timings["prefill_chunks"], trace)),
        ]
        transfer = {"pdserve.kv.bytes": timings["kv_bytes"], "pdserve.kv.chunks": timings["kv_chunks"]}
        transfer |= {"pdserve.kv.exposed_s": timings["kv_exposed_s"]}
        decode = [
            *self._span(trace, "kv_transfer", kv_start, kv_end, _tick_events(timings["kv_ticks"], trace), transfer),
            *self._span(trace, "decode_queue", kv_end, ready_end),
            *self._span(trace, "decode", ready_end, timings["wall_s"]),
        ]
        router = self._span(trace, "route", 0.0, route_end, _decision_events(record["decisions"], trace))
        return (router, [], [*prefill, *decode]) if is_local else (router, prefill, decode)

    def _root(self, record: Mapping[str, Any], trace: "_Trace", parent: Parent | None, ended_ns: int) -> Json:
        timings = record["timings"]
        is_failed = record["status"] == "failed"
        span = _span(trace, trace.root_id, "pdserve.generate", (trace.started_ns, ended_ns))
        span |= {"kind": _KIND_SERVER, "attributes": _attributes(self._about(record))}
        span["parentSpanId"] = parent.span_id if parent else ""
        status = {"code": _STATUS_ERROR, "message": record["error"]} if is_failed else {"code": _STATUS_OK}
        span["status"] = status
        if record["num_completion_tokens"]:
            span["events"] = [_event("first_token", trace.at(timings["time_to_first_token_s"]), {})]
        return span

    def _about(self, record: Mapping[str, Any]) -> Json:
        """Attribute names are those of the GenAI conventions, and vLLM's where these have none."""
        timings = record["timings"]
        return {
            "gen_ai.request.model": self._origin.model,
            "gen_ai.response.id": record["request_id"],
            "gen_ai.usage.input_tokens": record["num_prompt_tokens"],
            "gen_ai.usage.output_tokens": record["num_completion_tokens"],
            "gen_ai.latency.time_to_first_token": timings["time_to_first_token_s"],
            "gen_ai.latency.time_in_queue": timings["prefill_queue_s"],
            "gen_ai.latency.e2e": timings["wall_s"],
            "pdserve.cached_tokens": record["num_cached_tokens"],
            "pdserve.retries": record["num_retries"],
            "error.type": record["error"] or None,
        }

    def _span(
        self,
        trace: "_Trace",
        name: str,
        start_s: float,
        end_s: float,
        events: Sequence[Json] = (),
        attributes: Mapping[str, object] | None = None,
    ) -> list[Json]:
        if end_s <= start_s:
            return []
        span = _span(trace, self._id(16), name, (trace.at(start_s), trace.at(end_s)))
        span |= {"parentSpanId": trace.root_id, "kind": _KIND_INTERNAL, "events": list(events[:_MAX_EVENTS])}
        return [span | {"attributes": _attributes(attributes or {})}]

    def _resource(self, name: str, instance: str, spans: list[Json]) -> Json:
        about = {"service.name": name, "service.instance.id": instance, "service.version": self._origin.version}
        scope = {"name": SCOPE, "version": self._origin.version}
        return {"resource": {"attributes": _attributes(about)}, "scopeSpans": [{"scope": scope, "spans": spans}]}

    def _id(self, num_digits: int) -> str:
        """Not zero, which means none."""
        return f"{self._ids.randrange(1, 16**num_digits):0{num_digits}x}"


@dataclass(frozen=True, slots=True)
class _Trace:
    trace_id: str
    root_id: str
    started_ns: int

    def at(self, seconds: float) -> int:
        return self.started_ns + round(seconds * 1e9)


def _span(trace: _Trace, span_id: str, name: str, times_ns: tuple[int, int]) -> Json:
    """64-bit numbers are strings in OTLP's JSON."""
    return {
        "traceId": trace.trace_id,
        "spanId": span_id,
        "name": name,
        "startTimeUnixNano": str(times_ns[0]),
        "endTimeUnixNano": str(times_ns[1]),
    }


def _event(name: str, at_ns: int, attributes: Mapping[str, object]) -> Json:
    return {"name": name, "timeUnixNano": str(at_ns), "attributes": _attributes(attributes)}


def _chunk_events(chunks: Sequence[Sequence[float]], trace: _Trace) -> list[Json]:
    return [
        _event("prefill_chunk", trace.at(end_s), {"num_tokens": int(num_tokens), "duration_s": end_s - start_s})
        for start_s, end_s, num_tokens in chunks
    ]


def _tick_events(ticks: Sequence[Sequence[float]], trace: _Trace) -> list[Json]:
    names = ("layer_start", "layer_end", "num_tokens")
    return [
        _event("kv_chunk", trace.at(at_s), dict(zip(names, map(int, numbers), strict=True))) for at_s, *numbers in ticks
    ]


def _decision_events(decisions: Sequence[Mapping[str, Any]], trace: _Trace) -> list[Json]:
    names = ("role", "chosen", "why")
    return [_event("decision", trace.at(each["at_s"]), {name: each[name] for name in names}) for each in decisions]


def _attributes(values: Mapping[str, object]) -> list[Json]:
    return [{"key": key, "value": _value(value)} for key, value in values.items() if value is not None]


def _value(value: object) -> Json:
    if isinstance(value, int):
        return {"intValue": str(value)}
    return {"doubleValue": value} if isinstance(value, float) else {"stringValue": str(value)}
