"""The whole bench against our own front end over a scripted service, and the client against raw sockets."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from common.values.errors import Overloaded
from deploy.load.bench import BenchFailed, BenchOptions, goal_of, run_bench
from deploy.load.http_client import Endpoint, HttpFailed, events, fetch
from deploy.load.openai_client import Target, ask
from deploy.load.plan import Piece, PlannedRequest, Shape
from deploy.load.prompts import Prompts
from deploy.load.results import Goal, Outcome
from deploy.load.run import Run
from router.core.generation import Failed
from tests.deploy.load.test_plan import MOONCAKE
from tests.ui.page_service import Served, served

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\n"
EVENT = b'data: {"choices": [{"text": "a"}]}\n\n'


@pytest.fixture(scope="module")
def page() -> object:
    with served() as started:
        yield started


def options(page: Served, **fields: object) -> BenchOptions:
    base = BenchOptions(page.rig.url, num_requests=12, rate_per_s=200.0, shape=Shape(20, 5))
    return replace(base, **fields)  # type: ignore[arg-type]


def test_a_run_reports_and_writes_what_it_measured(
    page: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page.service.submitted.clear()
    files = {"result": tmp_path / "r.json", "plot": tmp_path / "r.svg"}
    code = run_bench(options(page, goal=Goal(ttft_s=60.0), **files))
    result = json.loads(files["result"].read_text())
    assert code == 0
    assert "Successful requests:                     12\n" in capsys.readouterr().out
    assert (result["completed"], result["failed"], result["prompt_form"]) == (12, 0, "token ids")
    assert (result["total_input_tokens"], result["model_id"]) == (12 * 20, "tiny")
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])
    assert files["plot"].read_text().startswith("<svg")
    assert {len(request.token_ids) for request in page.service.submitted} == {20}
    assert {request.sampling.max_tokens for request in page.service.submitted} == {5}


def test_prompts_are_ordinary_tokens_of_the_server(page: Served) -> None:
    page.service.submitted.clear()
    run_bench(options(page))
    assert all(token_id >= 3 for request in page.service.submitted for token_id in request.token_ids)  # no special one
    assert len({request.token_ids for request in page.service.submitted}) == 12


def test_a_trace_is_replayed_with_its_sharing(page: Served) -> None:
    page.service.submitted.clear()
    trace = {"dataset": "mooncake", "trace": MOONCAKE, "time_scale": 1000.0, "length_scale": 1 / 64}
    assert run_bench(options(page, **trace)) == 0
    assert len({request.token_ids[:8] for request in page.service.submitted}) == 1
    assert len({request.token_ids for request in page.service.submitted}) == 12


def test_chat_asks_in_words(page: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_bench(options(page, is_chat=True, as_json=True)) == 0
    assert json.loads(capsys.readouterr().out)["backend"] == "openai-chat"


def test_refused_requests_are_failures_with_their_reason(page: Served, capsys: pytest.CaptureFixture[str]) -> None:
    script = page.service.script
    page.service.script = lambda request: [Failed(Overloaded("9 requests wait already", retry_after_s=1.0))]
    code = run_bench(options(page))
    page.service.script = script
    captured = capsys.readouterr()
    assert code == 1
    assert "Failed requests:                         12\n" in captured.out
    assert "failed: 12 x HTTP 503" in captured.err
    assert "9 requests wait already" in captured.err


def test_without_a_server_there_is_one_sentence() -> None:
    with pytest.raises(BenchFailed, match=r"no connection to 127\.0\.0\.1:9"):
        run_bench(BenchOptions("http://127.0.0.1:9"))


@asynccontextmanager
async def raw_server(handler: Handler) -> AsyncIterator[Endpoint]:
    server = await asyncio.start_server(handler, "127.0.0.1", 0)
    async with server:
        yield Endpoint.of(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/base/v1")


def answering(*pieces: bytes) -> Handler:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        writer.close()

    return handle


def chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x;ext=1\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


@pytest.mark.parametrize(
    "pieces",
    [
        (OK + b"Content-Length: 5\r\n\r\nhello",),
        (OK + b"\r\nhel", b"lo"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(b"hel", b"lo"),),
        (b"HTTP/1.0 200 OK\n\nhello",),
    ],
)
async def test_bodies_come_in_every_form(pieces: tuple[bytes, ...]) -> None:
    async with raw_server(answering(*pieces)) as endpoint:
        assert await fetch(endpoint, "GET", "/v1/models") == b"hello"


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ((b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nbusy",), "HTTP 503: busy"),
        ((b"",), "closed the connection"),
        ((b"SSH-2.0-OpenSSH\r\n",), "not HTTP/1.1"),
        ((OK + b"Content-Length: 50\r\n\r\nhello",), "broke off"),
        ((OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhel",), "broke off"),
        ((OK + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n",), "broke off"),
    ],
)
async def test_answers_that_are_none_fail_with_a_reason(pieces: tuple[bytes, ...], message: str) -> None:
    async with raw_server(answering(*pieces)) as endpoint:
        with pytest.raises(HttpFailed, match=message):
            await fetch(endpoint, "GET", "/v1/models")


async def test_events_are_found_however_they_are_cut() -> None:
    data = b": keep-alive\r\n\r\nevent: x\r\ndata: one\r\n\r\ndata:two\n\ndata: rest"

    async def cut(size: int) -> AsyncIterator[bytes]:
        for start in range(0, len(data), size):
            yield data[start : start + size]

    for size in (1, 2, 3, 7, 100):
        assert [event async for event in events(cut(size))] == [b"one", b"two"], size


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (EVENT + b"data: [DONE]\n\n", ""),
        (EVENT + b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 7}}\n\n', ""),
        (b"data: [DONE]\n\n", "without a token"),
        (b'data: {"error": {"message": "worker lost"}}\n\n', "worker lost"),
        (b"data: {nonsense\n\n", "Expecting"),
    ],
)
async def test_a_streamed_answer_is_followed_to_its_end(body: bytes, error: str) -> None:
    async with raw_server(answering(OK + b"\r\n" + body)) as endpoint:
        outcome = Outcome(time.perf_counter())
        await ask(Target(endpoint, "m"), b"{}", outcome)
    assert error in outcome.error
    assert bool(outcome.error) == bool(error)
    assert outcome.ended_s >= outcome.sent_s >= outcome.planned_s


async def test_a_silent_server_is_a_failure_after_the_time_out() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with raw_server(silent) as endpoint:
        outcome = Outcome(0.0)
        await ask(Target(endpoint, "m", timeout_s=0.05), b"{}", outcome)
    assert outcome.error == "no end within 0.05 s"


async def test_a_stuck_server_does_not_slow_the_load_and_its_queue_is_seen() -> None:
    """With one place, later requests wait; their first tokens count from when they should have been sent."""
    release = asyncio.Event()
    num_asked = 0

    async def stuck(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_asked
        num_asked += 1
        await reader.readuntil(b"\r\n\r\n")
        await release.wait()
        writer.write(OK + b"\r\n" + EVENT + b"data: [DONE]\n\n")
        writer.close()

    async with raw_server(stuck) as endpoint:
        run = Run(Target(endpoint, "m"), Prompts(range(9), 1), max_concurrency=1)
        plan = [PlannedRequest(0.01 * idx, (Piece("p", 4),), 2) for idx in range(5)]
        sending = asyncio.create_task(run.send(plan, lambda _: None))
        while len(run.outcomes) < 5:  # noqa: ASYNC110 - all are planned though none is answered
            await asyncio.sleep(0.005)
        assert num_asked <= 1
        release.set()
        await sending
    assert [round(outcome.planned_s - run.started_s, 6) for outcome in run.outcomes] == [0.0, 0.01, 0.02, 0.03, 0.04]
    assert all(outcome.is_success for outcome in run.outcomes)
    assert run.outcomes[4].sent_s > run.outcomes[4].planned_s
    assert run.outcomes[4].ttft_s >= run.outcomes[4].event_s[0] - run.outcomes[4].sent_s


@pytest.mark.parametrize(
    ("url", "host", "port", "base"),
    [
        ("127.0.0.1:8000", "127.0.0.1", 8000, ""),
        ("http://h/v1/", "h", 80, ""),
        ("https://h/prefix/v1", "h", 443, "/prefix"),
        ("http://[::1]:9", "::1", 9, ""),
    ],
)
def test_addresses_are_understood(url: str, host: str, port: int, base: str) -> None:
    endpoint = Endpoint.of(url)
    assert (endpoint.host, endpoint.port, endpoint.base) == (host, port, base)


def test_the_key_is_a_header_and_nowhere_else() -> None:
    head = Endpoint.of("http://h", "k3y").head("POST", "/v1/completions", 3)
    assert b"Authorization: Bearer k3y\r\n" in head
    assert b"Authorization" not in Endpoint.of("http://h").head("GET", "/v1/models", 0)


def test_goals_are_named_bounds_in_milliseconds() -> None:
    assert goal_of(["ttft:500", "e2el:2000"]) == Goal(ttft_s=0.5, latency_s=2.0)
    assert goal_of([]) is None
    for wrong in ("ttf:5", "ttft", "ttft:fast"):
        with pytest.raises(ValueError, match=r"NAME:MILLISECONDS|could not convert"):
            goal_of([wrong])
