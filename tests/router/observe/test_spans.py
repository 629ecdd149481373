"""Spans of a record: one connected tree whose phases follow one another, and nothing when nobody wants them."""

import random
from typing import Any

import pytest

from router.observe.spans import Origin, Parent, SpanMaker, parent_of
from tests.ui.page_service import TIMINGS, record

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACE_PARENT = f"00-{TRACE}-{SPAN}-01"
ENDED_NS = 1_700_000_001_000_000_000


def resources(**fields: object) -> list[dict[str, Any]]:
    maker = SpanMaker(Origin("router-0", "tiny", "0.1.0"), random.Random(1))
    return maker.spans_of(record("req-1", **{"trace_parent": "", **fields}), ENDED_NS)


def spans(**fields: object) -> dict[str, dict[str, Any]]:
    return {span["name"]: span for each in resources(**fields) for span in each["scopeSpans"][0]["spans"]}


def values(attributes: list[dict[str, Any]]) -> dict[str, object]:
    return {each["key"]: next(iter(each["value"].values())) for each in attributes}


def seconds(span: dict[str, Any]) -> tuple[float, float]:
    start_ns = ENDED_NS - 1_000_000_000
    return (int(span["startTimeUnixNano"]) - start_ns) / 1e9, (int(span["endTimeUnixNano"]) - start_ns) / 1e9


def test_one_connected_trace_across_router_prefill_and_decode() -> None:
    made = spans(trace_parent=TRACE_PARENT)
    root = made.pop("pdserve.generate")
    services = [values(each["resource"]["attributes"]) for each in resources()]
    assert (root["traceId"], root["parentSpanId"], root["kind"]) == (TRACE, SPAN, 2)
    assert {span["traceId"] for span in made.values()} == {TRACE}
    assert {span["parentSpanId"] for span in made.values()} == {root["spanId"]}
    assert len({span["spanId"] for span in [root, *made.values()]}) == 7
    assert [(each["service.name"], each["service.instance.id"]) for each in services] == [
        ("pdserve-router", "router-0"), ("pdserve-prefill", "prefill-0#1"), ("pdserve-decode", "decode-0#1"),
    ]  # fmt: skip


def test_phases_follow_one_another_and_the_transfer_overlaps_the_prefill() -> None:
    made = spans()
    assert seconds(made["pdserve.generate"]) == (0.0, 1.0)
    assert seconds(made["route"]) == (0.0, 0.004)
    assert seconds(made["prefill_queue"]) == (0.004, 0.024)
    assert seconds(made["prefill"]) == (0.024, 0.324)
    assert seconds(made["kv_transfer"]) == pytest.approx((0.06, 0.34))
    assert seconds(made["decode_queue"]) == pytest.approx((0.34, 0.35))
    assert seconds(made["decode"]) == pytest.approx((0.35, 1.0))


def test_events_mark_the_first_token_chunks_and_decisions() -> None:
    made = spans()
    assert [event["name"] for event in made["pdserve.generate"]["events"]] == ["first_token"]
    assert [values(event["attributes"])["num_tokens"] for event in made["prefill"]["events"]] == ["512", "512", "476"]
    assert len(made["kv_transfer"]["events"]) == 12
    assert values(made["route"]["events"][0]["attributes"])["chosen"] == "prefill-0"


def test_attributes_are_typed_and_say_what_was_asked() -> None:
    about = spans()["pdserve.generate"]["attributes"]
    by_key = {each["key"]: each["value"] for each in about}
    assert by_key["gen_ai.usage.input_tokens"] == {"intValue": "2012"}
    assert by_key["gen_ai.latency.e2e"] == {"doubleValue": 1.0}
    assert by_key["gen_ai.request.model"] == {"stringValue": "tiny"}


def test_a_failed_request_is_an_error_with_its_code() -> None:
    root = spans(status="failed", error="worker_lost", num_completion_tokens=0)["pdserve.generate"]
    assert root["status"] == {"code": 2, "message": "worker_lost"}
    assert values(root["attributes"])["error.type"] == "worker_lost"
    assert "events" not in root


def test_a_local_prefill_is_the_decode_workers_and_has_no_transfer() -> None:
    attempt = {"attempt": 0, "is_local": True, "prefill_worker": "", "decode_worker": "decode-0"}
    timings = {**TIMINGS, "kv_transfer_s": 0.0, "kv_exposed_s": 0.0, "prefill_queue_s": 0.0, "kv_ticks": []}
    made = resources(attempts=[attempt], timings=timings)
    names = [[span["name"] for span in each["scopeSpans"][0]["spans"]] for each in made]
    assert names == [["pdserve.generate", "route"], ["prefill", "decode_queue", "decode"]]


@pytest.mark.parametrize(
    ("text", "parent"),
    [
        (TRACE_PARENT, Parent(TRACE, SPAN, is_sampled=True)),
        (f" 01-{TRACE}-{SPAN}-00-later ", Parent(TRACE, SPAN, is_sampled=False)),
        ("", None),
        ("nonsense", None),
        (f"ff-{TRACE}-{SPAN}-01", None),
        (f"00-{'0' * 32}-{SPAN}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE.upper()}-{SPAN}-01", None),
        (f"00-{TRACE}-{SPAN}-01\r\nx", None),
    ],
)
def test_trace_parents_are_w3cs(text: str, parent: Parent | None) -> None:
    assert parent_of(text) == parent


def test_what_the_client_does_not_sample_makes_nothing() -> None:
    assert resources(trace_parent=f"00-{TRACE}-{SPAN}-00") == []


def test_without_a_parent_each_request_is_a_trace_of_its_own() -> None:
    maker = SpanMaker(Origin("router-0", "tiny", "0.1.0"), random.Random(1))
    ids = {maker.spans_of(record("r"), ENDED_NS)[0]["scopeSpans"][0]["spans"][0]["traceId"] for _ in range(20)}
    assert len(ids) == 20
    assert {len(trace_id) for trace_id in ids} == {32}
