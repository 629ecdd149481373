"""The exporter against a collector on a real port: batches, order, a collector that fails, a full queue."""

import asyncio
from collections.abc import Iterator

import pytest

from router.observe import otlp
from router.observe.otlp import DROPPED, TraceExporter
from router.observe.spans import Origin
from tests.router.observe.collector import Collector
from tests.ui.page_service import record
from tests.waiting import LIMIT_S, until


class Counts:
    """Counters, by name."""

    def __init__(self) -> None:
        self.dropped = 0.0

    def inc(self, name: str, amount: float = 1.0, **labels: str) -> None:
        assert name == DROPPED
        self.dropped += amount

    def set(self, name: str, value: float, **labels: str) -> None: ...

    def observe(self, name: str, value: float, **labels: str) -> None: ...


@pytest.fixture
def collector() -> Iterator[Collector]:
    started = Collector()
    yield started
    started.close()


def exporter(url: str, counts: Counts) -> TraceExporter:
    return TraceExporter(url, Origin("router-0", "tiny", "0.1.0"), counts)


async def test_requests_are_sent_in_batches_with_the_headers(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otlp, "BATCH_INTERVAL_S", 0.01)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20t0ken, x-scope = a=b")
    sender = exporter(collector.url, Counts())
    for idx in range(3):
        sender.add(record(f"r{idx}"))

    async def has_all() -> bool:
        return len(collector.request_ids) == 3

    await until(has_all)
    await sender.close()
    assert collector.request_ids == ["r0", "r1", "r2"]
    assert collector.headers[0]["authorization"] == "Bearer t0ken"
    assert collector.headers[0]["x-scope"] == "a=b"
    assert collector.headers[0]["content-type"] == "application/x-protobuf"


async def test_what_is_left_is_sent_at_the_end(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "_FLUSH_LIMIT_S", LIMIT_S)
    counts = Counts()
    sender = exporter(collector.url, counts)
    for idx in range(200):
        sender.add(record(f"r{idx}"))
    await sender.close()
    assert (len(collector.request_ids), len(collector.bodies), counts.dropped) == (200, 3, 0)


async def test_what_the_collector_refuses_is_counted_and_forgotten(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(otlp, "BATCH_INTERVAL_S", 0.01)
    counts = Counts()
    sender = exporter(collector.url, counts)

    async def is_dropped() -> bool:
        return counts.dropped == 1

    collector.status = 400
    sender.add(record("lost"))
    await until(is_dropped)
    collector.status = 200
    sender.add(record("kept"))
    await sender.close()
    assert counts.dropped == 1
    assert collector.request_ids == ["lost", "kept"]
    said = capsys.readouterr().out
    assert (said.count("traces_not_taken"), said.count("traces_taken_again")) == (1, 1)


@pytest.mark.parametrize("status", [0, 503])
async def test_a_collector_that_is_away_costs_traces_only(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """Whether it refuses connections or asks to try again: the end does not wait for it."""
    monkeypatch.setattr(otlp, "_FLUSH_LIMIT_S", 0.1)
    monkeypatch.setattr(otlp, "_TIMEOUT_S", 2 * LIMIT_S)
    counts = Counts()
    collector.status = status
    sender = exporter(collector.url if status else "http://127.0.0.1:9/v1/traces", counts)
    sender.add(record("r"))
    async with asyncio.timeout(LIMIT_S):
        await sender.close()
    assert counts.dropped == 1


async def test_the_queue_is_bounded(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not sampled takes no place for long."""
    monkeypatch.setattr(otlp, "_FLUSH_LIMIT_S", 0.0)
    monkeypatch.setattr(otlp, "MAX_QUEUED", 100)
    counts = Counts()
    sender = exporter("http://127.0.0.1:9/v1/traces", counts)
    monkeypatch.setattr(sender._processor, "on_end", lambda span: None)  # the SDK's thread is far behind
    unsampled = {"trace_parent": f"00-{'a' * 32}-{'b' * 16}-00"}
    for _ in range(100):
        sender.add(record("r", **unsampled))

    async def is_empty() -> bool:
        return sender._num_skipped == 100

    await until(is_empty)
    for _ in range(105):
        sender.add(record("r"))
    assert counts.dropped == 5
    await sender.close()


async def test_a_record_that_breaks_the_maker_costs_its_trace_alone(
    collector: Collector, capsys: pytest.CaptureFixture[str]
) -> None:
    sender = exporter(collector.url, Counts())
    sender.add({"timings": {}})
    sender.add(record("r"))
    await sender.close()
    assert collector.request_ids == ["r"]
    assert "trace_failed" in capsys.readouterr().out
