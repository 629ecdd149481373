"""The exporter against a collector on a real port: batches, order, a collector that fails, a full queue."""

import asyncio
import json
import random
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from router.observe import otlp
from router.observe.otlp import DROPPED, MAX_QUEUED, OtlpExporter, headers_of
from router.observe.spans import Origin, SpanMaker
from tests.ui.page_service import record
from tests.waiting import until


class Collector:
    """Keeps what it gets; answers with `status`."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.status = 200
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.bodies.append(json.loads(body))
                collector.headers.append({name.lower(): value for name, value in self.headers.items()})
                self.send_response(collector.status)
                self.send_header("content-length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def request_ids(self) -> list[str]:
        """Of the root spans, in order."""
        spans = [
            span for body in self.bodies for each in body["resourceSpans"] for span in each["scopeSpans"][0]["spans"]
        ]
        roots = [span for span in spans if span["name"] == "pdserve.generate"]
        attributes = [{each["key"]: each["value"] for each in root["attributes"]} for root in roots]
        return [each["gen_ai.response.id"]["stringValue"] for each in attributes]


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


def exporter(url: str, counts: Counts) -> OtlpExporter:
    spans = SpanMaker(Origin("router-0", "tiny", "0.1.0"), random.Random(1))
    return OtlpExporter(url, spans, counts, {"x-api-key": "k"})


async def test_requests_are_sent_in_batches_with_the_headers(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otlp, "BATCH_INTERVAL_S", 0.01)
    sender = exporter(collector.url, Counts())
    for idx in range(3):
        sender.add(record(f"r{idx}"))
    sending = asyncio.create_task(sender.run())

    async def has_all() -> bool:
        return len(collector.request_ids) == 3

    await until(has_all)
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    assert collector.request_ids == ["r0", "r1", "r2"]
    assert len(collector.bodies) == 1
    assert collector.headers[0]["x-api-key"] == "k"
    assert collector.headers[0]["content-type"] == "application/json"


async def test_what_is_left_is_sent_at_the_end(collector: Collector) -> None:
    counts = Counts()
    sender = exporter(collector.url, counts)
    for idx in range(200):
        sender.add(record(f"r{idx}"))
    await sender.flush()
    assert (len(collector.request_ids), len(collector.bodies), counts.dropped) == (200, 2, 0)


@pytest.mark.parametrize("status", [400, 503])
async def test_what_the_collector_refuses_is_counted_and_forgotten(collector: Collector, status: int) -> None:
    counts = Counts()
    sender = exporter(collector.url, counts)
    collector.status = status
    sender.add(record("lost"))
    await sender.flush()
    collector.status = 200
    sender.add(record("kept"))
    await sender.flush()
    assert counts.dropped == 1
    assert collector.request_ids == ["lost", "kept"]


async def test_a_collector_that_is_away_costs_traces_only() -> None:
    counts = Counts()
    sender = exporter("http://127.0.0.1:9/v1/traces", counts)
    sender.add(record("r"))
    await sender.flush()
    assert counts.dropped == 1


async def test_the_queue_is_bounded() -> None:
    counts = Counts()
    sender = exporter("http://127.0.0.1:9/v1/traces", counts)
    for _ in range(MAX_QUEUED + 5):
        sender.add(record("r"))
    assert counts.dropped == 5


def test_headers_come_from_opentelemetrys_variable() -> None:
    text = "authorization=Bearer%20t0ken, x-scope = a=b,broken"
    assert headers_of({"OTEL_EXPORTER_OTLP_HEADERS": text}) == {"authorization": "Bearer t0ken", "x-scope": "a=b"}
    assert headers_of({}) == {}
