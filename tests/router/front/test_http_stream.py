"""Streams of events: what ends them, what is cancelled, and what the client sees."""

import asyncio
import dataclasses
import json
import socket
import struct
from typing import Any

import openai
import pytest

from common.values.errors import DeadlineExceeded, WorkerFailed
from common.values.request import FinishReason
from router.core.generation import Finished, GenerationRequest
from router.request import limits
from tests.router.front.http_rig import SETTINGS, HttpRig, http_rig, ids, in_flight
from tests.router.front.scripted_service import (
    Pause,
    Script,
    ScriptedService,
    accepted,
    always,
    answer,
    failing,
    tokens,
)
from tests.router.text.tokenizers_for_tests import IM_END_ID
from tests.waiting import until


def hangs_after(text: str) -> ScriptedService:
    """Gives some text and then nothing, until it is cancelled."""

    def script(request: GenerationRequest) -> Script:
        return [accepted(request), *tokens([ids(text)], None), Pause()]

    return ScriptedService(script)


def silent() -> ScriptedService:
    return ScriptedService(lambda _: [Pause()])


async def send(
    rig: HttpRig, body: dict[str, Any], *, small_buffers: bool = False, padding: bytes = b""
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A raw connection with one request sent; the server closes it after the answer."""
    limit, receive_buffer = (2048, 4096) if small_buffers else (1 << 16, 1 << 16)
    connection = socket.create_connection(("127.0.0.1", rig.port))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    reader, writer = await asyncio.open_connection(sock=connection, limit=limit)
    content = json.dumps(body).encode() + padding
    head = f"content-type: application/json\r\ncontent-length: {len(content)}\r\nconnection: close\r\n"
    head += "x-request-timeout-s: 600\r\n\r\n"
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + head.encode() + content)
    await writer.drain()
    return reader, writer


def reset(writer: asyncio.StreamWriter) -> None:
    """Close with a TCP reset instead of an orderly end."""
    raw = writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def events_of(body: str) -> list[str]:
    """As a client that splits lines the Python way would see them."""
    lines = [line for line in body.splitlines() if line]
    assert all(line.startswith("data: ") for line in lines), lines
    return [line.removeprefix("data: ") for line in lines]


@pytest.mark.parametrize("how", ["close", "reset"])
async def test_a_reader_that_leaves_a_stream_is_cancelled(how: str) -> None:
    service = hangs_after("abc")
    async with http_rig(service) as rig:
        reader, writer = await send(rig, {"prompt": "x", "stream": True})
        for _ in range(3):
            await reader.readuntil(b"data: ")
        writer.close() if how == "close" else reset(writer)
        await in_flight(rig.frontend, 0)
    assert service.cancelled == [service.submitted[0].request_id]


@pytest.mark.parametrize("how", ["close", "reset"])
async def test_a_client_that_leaves_while_it_waits_is_cancelled(how: str) -> None:
    service = silent()
    async with http_rig(service) as rig:
        _, writer = await send(rig, {"prompt": ["x", "y"], "n": 2})
        await in_flight(rig.frontend, 2)
        writer.close() if how == "close" else reset(writer)
        await in_flight(rig.frontend, 0)
    assert sorted(service.cancelled) == sorted(request.request_id for request in service.submitted)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_after_a_large_body_is_cancelled(stream: bool) -> None:
    """Reading is paused when more has come than was taken; unless it goes on, the end is not seen."""
    service = silent()
    async with http_rig(service) as rig:
        _, writer = await send(rig, {"prompt": "x", "stream": stream}, padding=b" " * 700_000)
        await in_flight(rig.frontend, 1)
        writer.close()
        await in_flight(rig.frontend, 0)
    assert service.cancelled == [service.submitted[0].request_id]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_the_first_token_has_its_status(stream: bool) -> None:
    for error, status in ((WorkerFailed("decode-0 was lost"), 500), (DeadlineExceeded("too late"), 504)):
        async with http_rig(failing(error, lambda request: [accepted(request)])) as rig:
            reply = await rig.post("/v1/completions", {"prompt": "x", "stream": stream})
        assert reply.status_code == status
        assert reply.json()["error"]["code"] == error.code


async def test_a_failure_in_a_stream_is_one_error_and_no_end() -> None:
    error = WorkerFailed("decode-0 was lost")
    service = failing(error, lambda request: [accepted(request), *tokens([ids("abc")], None)])
    async with http_rig(service) as rig:
        reply = await rig.post("/v1/completions", {"prompt": "x", "stream": True})
    events = [json.loads(event) for event in events_of(reply.text)]
    assert events[-1] == {
        "error": {"message": "decode-0 was lost", "type": "internal_error", "param": None, "code": "worker_lost"}
    }
    assert [event["choices"][0]["text"] for event in events[:-1]] == ["a", "b", "c"]
    assert not any(event["choices"][0]["finish_reason"] for event in events[:-1])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", ["nothing", "finished without tokens", "no end"])
async def test_an_empty_success_is_an_error(script: str, stream: bool) -> None:
    def answer_(request: GenerationRequest) -> Script:
        finished = Finished(1, 0, 0)
        scripts: dict[str, Script] = {
            "nothing": [],
            "finished without tokens": [accepted(request), finished],
            "no end": [*tokens([ids("ab")], None), finished],
        }
        return scripts[script]

    async with http_rig(ScriptedService(answer_)) as rig:
        reply = await rig.post("/v1/completions", {"prompt": "x", "stream": stream})
    if stream and script == "no end":
        assert "error" in json.loads(events_of(reply.text)[-1])
    else:
        assert reply.status_code == 500
    assert '"finish_reason":"' not in reply.text


@pytest.mark.parametrize("text", ["\n\ndata: [DONE]\n\n", "\r", "\x00", "\u2028\u2029", "\x85", '"}\n', "\x0b\x0c\x1c"])
async def test_output_that_looks_like_protocol_is_only_text(text: str) -> None:
    async with http_rig(always([*ids(text), IM_END_ID], FinishReason.STOP)) as rig:
        reply = await rig.post("/v1/completions", {"prompt": "x", "stream": True})
        whole = await rig.post("/v1/completions", {"prompt": "x"})
    events = events_of(reply.text)
    assert events.count("[DONE]") == 1 and events[-1] == "[DONE]"
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]) == text
    assert whole.json()["choices"][0]["text"] == text


async def test_a_quiet_stream_is_kept_alive_with_comments() -> None:
    settings = dataclasses.replace(SETTINGS, keep_alive_s=0.05)
    async with http_rig(silent(), settings) as rig:
        reader, writer = await send(rig, {"prompt": "x", "stream": True})
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
        for _ in range(2):
            await asyncio.wait_for(reader.readuntil(b": keep-alive\n\n"), 60)
        writer.close()
        await in_flight(rig.frontend, 0)
    assert head.startswith(b"HTTP/1.1 200") and b"text/event-stream" in head


async def test_a_failure_after_a_keep_alive_is_an_error_event() -> None:
    settings = dataclasses.replace(SETTINGS, keep_alive_s=0.002)
    async with http_rig(silent(), settings) as rig:
        reading = asyncio.ensure_future(
            rig.client.post(
                "/v1/completions", json={"prompt": "x", "stream": True}, headers={"x-request-timeout-s": "0.3"}
            )
        )
        reply = await reading
    assert reply.status_code == 200
    last = reply.text.strip().rpartition("data: ")[2]
    assert json.loads(last)["error"]["code"] == "deadline_exceeded"
    assert "[DONE]" not in reply.text


@pytest.mark.parametrize("stream", [False, True])
async def test_the_timeout_header_is_a_deadline(stream: bool) -> None:
    service = silent()
    async with http_rig(service) as rig:
        body = {"prompt": "x", "stream": stream}
        reply = await rig.client.post("/v1/completions", json=body, headers={"x-request-timeout-s": "0.1"})
    assert reply.status_code == 504
    assert reply.json()["error"] == {
        "message": "the request did not end within 0.1 s: the deadline that its client stated "
        "(x-request-timeout-s, in gRPC the call's own), else router.default_deadline_s",
        "type": "timeout_error",
        "param": None,
        "code": "deadline_exceeded",
    }
    assert service.submitted[0].deadline_s == 0.1
    assert len(service.cancelled) == 1


async def test_a_healthy_stream_that_reaches_its_deadline_ends_with_an_error_that_names_the_setting() -> None:
    """By the service's own clock or by ours, whichever is first."""
    late = DeadlineExceeded("not finished within 10 s")
    of_service = failing(late, lambda request: [accepted(request), *tokens([ids("abc")], None)])
    for service, deadline_s in ((of_service, 10.0), (hangs_after("abc"), 0.2)):
        async with http_rig(service, deadline_s=deadline_s) as rig:
            reply = await rig.post("/v1/completions", {"prompt": "x", "stream": True})
        *events, last = map(json.loads, events_of(reply.text))
        assert "".join(event["choices"][0]["text"] for event in events) == "abc"
        assert last["error"]["code"] == "deadline_exceeded"
        assert "router.default_deadline_s" in last["error"]["message"]
        assert f"{deadline_s:g} s" in last["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_aborted_answer_ends_with_an_error_and_not_with_a_word_that_openais_api_lacks(stream: bool) -> None:
    """Its official client, which knows the words, gets what came and then the error."""
    async with http_rig(hangs_after("abc")) as rig:
        client = rig.openai
        texts: list[str] = []

        async def read() -> None:
            answer = await client.completions.create(model="tiny", prompt="x", stream=stream)
            async for chunk in answer:
                assert chunk.choices[0].finish_reason is None
                texts.append(chunk.choices[0].text)

        reading = asyncio.ensure_future(read())
        await in_flight(rig.frontend, 1)

        async def has_come() -> bool:
            return not stream or "".join(texts) == "abc"

        await until(has_come)
        service = rig.frontend.service
        assert isinstance(service, ScriptedService)
        assert rig.frontend.in_flight.abort(service.submitted[0].request_id, "")
        with pytest.raises(openai.APIError) as ended:
            await reading
    assert ended.value.code == "request_cancelled"
    assert "".join(texts) == ("abc" if stream else "")


async def test_a_reader_that_stops_reading_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """The output is far larger than all buffers between; the reader takes one byte and then nothing."""
    monkeypatch.setattr(limits, "WRITE_TIMEOUT_S", 0.2)
    text = "x" * 200
    service = ScriptedService(lambda request: answer(request, ids(text) * 200))

    async def is_dropped() -> bool:
        return rig.server.num_connections == 0

    async with http_rig(service) as rig:
        reader, writer = await send(rig, {"prompt": "x", "stream": True, "logprobs": 2}, small_buffers=True)
        await reader.readexactly(1)
        await in_flight(rig.frontend, 0)
        assert len(service.cancelled) == 1
        await until(is_dropped)
        writer.transport.abort()


async def test_a_slow_reader_gets_everything() -> None:
    text = "abcdefghij" * 300
    async with http_rig(always(ids(text))) as rig:
        reader, writer = await send(rig, {"prompt": "x", "stream": True}, small_buffers=True)
        received = b""
        while piece := await reader.read(512):
            received += piece
        writer.close()
    events = [line[6:] for line in received.split(b"\n") if line.startswith(b"data: {")]
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == text


async def test_the_text_of_an_exception_stays_inside(capfd: pytest.CaptureFixture[str]) -> None:
    """Before the first token and in the middle of a stream; nor is any prompt logged."""

    def script(request: GenerationRequest) -> Script:
        if len(request.token_ids) > 12:
            raise RuntimeError("CANARY-9c1 prompt text")
        # A gap in the positions is a bug that an assertion finds.
        return [accepted(request), *tokens([ids("ab")], None)[::-1]]

    async with http_rig(ScriptedService(script)) as rig:
        before = await rig.post("/v1/completions", {"prompt": "CANARY-9c1 long", "stream": True})
        whole = await rig.post("/v1/completions", {"prompt": "CANARY-9c1"})
    assert before.status_code == whole.status_code == 500
    captured = capfd.readouterr()
    assert (captured.out + captured.err).count("internal_error") == 2
    for text in (before.text, whole.text, captured.out, captured.err):
        assert "CANARY" not in text
