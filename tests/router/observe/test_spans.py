"""Spans of a record: one connected tree whose phases follow one another, and none where they are not wanted."""

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanContext, SpanKind, StatusCode

from router.observe.spans import Origin, SpanMaker
from tests.ui.page_service import TIMINGS, record

TRACE, SPAN = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7
TRACE_PARENT = f"00-{TRACE:032x}-{SPAN:016x}-01"
ENDED_NS = 1_700_000_001_000_000_000


def made(**fields: object) -> list[ReadableSpan]:
    exporter = InMemorySpanExporter()
    maker = SpanMaker(Origin("router-0", "tiny", "0.1.0"), SimpleSpanProcessor(exporter))
    maker.make(record("req-1", **{"trace_parent": "", **fields}), ENDED_NS)
    return list(exporter.get_finished_spans())


def by_name(**fields: object) -> dict[str, ReadableSpan]:
    return {span.name: span for span in made(**fields)}


def service(span: ReadableSpan) -> tuple[object, object]:
    return span.resource.attributes["service.name"], span.resource.attributes["service.instance.id"]


def attributes(span: ReadableSpan) -> dict[str, object]:
    return dict(span.attributes or {})


def context(span: ReadableSpan) -> SpanContext:
    assert span.context is not None
    return span.context


def seconds(span: ReadableSpan) -> tuple[float, float]:
    assert span.start_time is not None
    assert span.end_time is not None
    start_ns = ENDED_NS - 1_000_000_000
    return (span.start_time - start_ns) / 1e9, (span.end_time - start_ns) / 1e9


def test_one_connected_trace_across_router_prefill_and_decode() -> None:
    spans = by_name(trace_parent=TRACE_PARENT)
    root = spans.pop("pdserve.generate")
    assert root.parent is not None
    assert (root.parent.trace_id, root.parent.span_id, root.kind) == (TRACE, SPAN, SpanKind.SERVER)
    assert {context(span).trace_id for span in (root, *spans.values())} == {TRACE}
    assert {span.parent.span_id for span in spans.values() if span.parent} == {context(root).span_id}
    assert len({context(span).span_id for span in [root, *spans.values()]}) == 7
    assert {name: service(span)[0] for name, span in spans.items()} == {
        "route": "pdserve-router", "prefill_queue": "pdserve-prefill", "prefill": "pdserve-prefill",
        "kv_transfer": "pdserve-decode", "decode_queue": "pdserve-decode", "decode": "pdserve-decode",
    }  # fmt: skip
    assert {service(span)[1] for span in (root, *spans.values())} == {"router-0", "prefill-0#1", "decode-0#1"}


def test_phases_follow_one_another_and_the_transfer_overlaps_the_prefill() -> None:
    spans = by_name()
    assert seconds(spans["pdserve.generate"]) == (0.0, 1.0)
    assert seconds(spans["route"]) == (0.0, 0.004)
    assert seconds(spans["prefill_queue"]) == (0.004, 0.024)
    assert seconds(spans["prefill"]) == (0.024, 0.324)
    assert seconds(spans["kv_transfer"]) == pytest.approx((0.06, 0.34))
    assert seconds(spans["decode_queue"]) == pytest.approx((0.34, 0.35))
    assert seconds(spans["decode"]) == pytest.approx((0.35, 1.0))


def test_events_mark_the_first_token_chunks_and_decisions() -> None:
    spans = by_name()
    (first_token,) = spans["pdserve.generate"].events
    assert first_token.name == "first_token"
    assert ENDED_NS - 1_000_000_000 < first_token.timestamp < ENDED_NS
    assert [dict(event.attributes or {})["num_tokens"] for event in spans["prefill"].events] == [512, 512, 476]
    assert len(spans["kv_transfer"].events) == 12
    assert dict(spans["route"].events[0].attributes or {})["chosen"] == "prefill-0"


def test_attributes_are_typed_and_say_what_was_asked() -> None:
    about = attributes(by_name()["pdserve.generate"])
    assert about["gen_ai.usage.input_tokens"] == 2012
    assert about["gen_ai.latency.e2e"] == 1.0
    assert about["gen_ai.request.model"] == "tiny"


def test_a_failed_request_is_an_error_with_its_code() -> None:
    root = by_name(status="failed", error="worker_lost", num_completion_tokens=0)["pdserve.generate"]
    assert (root.status.status_code, root.status.description) == (StatusCode.ERROR, "worker_lost")
    assert attributes(root)["error.type"] == "worker_lost"
    assert root.events == ()


def test_a_local_prefill_is_the_decode_workers_and_has_no_transfer() -> None:
    attempt = {"attempt": 0, "is_local": True, "prefill_worker": "", "decode_worker": "decode-0"}
    timings = {**TIMINGS, "kv_transfer_s": 0.0, "kv_exposed_s": 0.0, "prefill_queue_s": 0.0, "kv_ticks": []}
    spans = by_name(attempts=[attempt], timings=timings)
    services = {name: service(span)[0] for name, span in spans.items()}
    router, decode = "pdserve-router", "pdserve-decode"
    assert services == {
        "pdserve.generate": router, "route": router, "prefill": decode, "decode_queue": decode, "decode": decode
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "is_parent"),
    [
        (TRACE_PARENT, True),
        (f" 01-{TRACE:032x}-{SPAN:016x}-01-later ", True),
        ("", False),
        ("nonsense", False),
        (f"ff-{TRACE:032x}-{SPAN:016x}-01", False),
        (f"00-{'0' * 32}-{SPAN:016x}-01", False),
        (f"00-{TRACE:032x}-{'0' * 16}-01", False),
        (f"00-{TRACE:032X}-{SPAN:016x}-01", False),
        (f"00-{TRACE:032x}-{SPAN:016x}-01\r\nx", False),
    ],
)
def test_trace_parents_are_w3cs(text: str, is_parent: bool) -> None:
    root = by_name(trace_parent=text)["pdserve.generate"]
    assert (root.parent is not None, context(root).trace_id == TRACE) == (is_parent, is_parent)


def test_what_the_client_does_not_sample_makes_nothing() -> None:
    assert made(trace_parent=f"00-{TRACE:032x}-{SPAN:016x}-00") == []


def test_without_a_parent_each_request_is_a_trace_of_its_own() -> None:
    assert len({context(span).trace_id for _ in range(20) for span in made()}) == 20
