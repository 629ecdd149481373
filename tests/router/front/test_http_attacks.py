"""Requests that no honest client sends, over a plain socket against the real server: refused, in bounded time."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from router.front.http import listening
from router.front.http import protocol as http_protocol
from router.request import limits
from tests.router.front.http_rig import HttpRig, http_rig, ids
from tests.router.front.raw_http import exchange, read_answer
from tests.router.front.scripted_service import ScriptedService, always
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")
BODY = b'{"prompt": "x"}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
LENGTH = b"Content-Length: 15\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
ONE_CHUNK = b"f\r\n" + BODY + b"\r\n0\r\n\r\n"
SMUGGLED = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig() -> AsyncIterator[HttpRig]:
    async with http_rig(always(ids("ok"))) as rig:
        yield rig


@pytest.fixture
def short_times(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everything that takes seconds takes a tenth of one."""
    monkeypatch.setattr(limits, "HEADER_TIMEOUT_S", 0.1)
    monkeypatch.setattr(limits, "BODY_TIMEOUT_S", 0.1)
    monkeypatch.setattr(http_protocol, "_SLACK_S", 0.1)
    monkeypatch.setattr(listening, "_SWEEP_INTERVAL_S", 0.02)
    yield


def submitted(rig: HttpRig) -> int:
    service = rig.frontend.service
    assert isinstance(service, ScriptedService)
    return len(service.submitted)


async def everything(port: int, raw: bytes) -> bytes:
    """All that comes back until the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(raw)
    async with asyncio.timeout(60):
        data = await reader.read()
    writer.close()
    return data


async def still_serves(rig: HttpRig) -> bool:
    return (await rig.post("/v1/completions", {"prompt": "canary"})).status_code == 200


async def test_plain_framings_work(rig: HttpRig) -> None:
    for raw in (HEAD + LENGTH + b"\r\n" + BODY, HEAD + CHUNKED + b"\r\n" + ONE_CHUNK):
        assert (await exchange(rig.port, raw))[0] == 200


@pytest.mark.parametrize(
    "framing",
    [
        LENGTH + CHUNKED,
        CHUNKED + LENGTH,
        b"Content-Length: 15\r\nContent-Length: 15\r\n",
        b"Content-Length: 15\r\nContent-Length: 16\r\n",
        b"Content-Length: 15, 15\r\n",
        b"Content-Length: +15\r\n",
        b"Content-Length: -15\r\n",
        b"Content-Length: 0x0f\r\n",
        b"Content-Length : 15\r\n",
        b"Transfer-Encoding: xchunked\r\n",
        b"Transfer-Encoding: identity\r\n",
        b"Transfer-Encoding: gzip, chunked\r\n",
        b"Transfer-Encoding: chunked, identity\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding : chunked\r\n",
        b"Transfer-Encoding: \x0bchunked\r\n",
        b"X: y\r\n Transfer-Encoding: chunked\r\n" + LENGTH + CHUNKED,
        b"X: y\nTransfer-Encoding: chunked\r\n" + LENGTH,
    ],
)
async def test_a_request_that_could_be_read_in_two_ways_is_refused_and_ends_the_connection(
    rig: HttpRig, framing: bytes
) -> None:
    before = submitted(rig)
    for body in (BODY, ONE_CHUNK):
        data = await everything(rig.port, HEAD + framing + b"\r\n" + body + SMUGGLED)
        assert data.startswith(b"HTTP/1.1 400 ")
        assert data.count(b"HTTP/1.1 ") == 1  # what follows is not a request
        error = json.loads(data.partition(b"\r\n\r\n")[2])["error"]
        assert set(error) == {"message", "type", "param", "code"}
    assert submitted(rig) == before
    assert await still_serves(rig)


@pytest.mark.parametrize("offer", [b"", b"Connection: Upgrade\r\nUpgrade: h2c\r\n"])
@pytest.mark.parametrize("framing", [b"", LENGTH, CHUNKED])
async def test_a_tunnel_is_refused_and_what_follows_is_no_request(rig: HttpRig, framing: bytes, offer: bytes) -> None:
    answer = await everything(rig.port, HEAD.replace(b"POST", b"CONNECT") + framing + offer + b"\r\n" + SMUGGLED)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 1


async def test_a_request_without_a_host_is_refused_where_the_version_asks_for_one(rig: HttpRig) -> None:
    answer = await everything(rig.port, b"GET /live HTTP/1.1\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"the host header is missing" in answer
    assert (await everything(rig.port, b"GET /live HTTP/1.0\r\n\r\n")).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "trailers",
    [b"X: y\r\n" * 5000, (b"X-" + b"n" * 99 + b": y\r\n") * 101, b"X: " + b"y" * (1 << 20) + b"\r\n"],
    ids=["many", "a few too many", "endless"],
)
async def test_trailers_are_bounded_like_headers(rig: HttpRig, trailers: bytes) -> None:
    before = submitted(rig)
    raw = HEAD + CHUNKED + b"\r\nf\r\n" + BODY + b"\r\n0\r\n" + trailers + b"\r\n"
    assert (await exchange_in_parts(rig.port, raw))[0] == 431
    assert submitted(rig) == before


async def test_the_size_line_of_a_chunk_is_bounded(rig: HttpRig) -> None:
    raw = HEAD + CHUNKED + b"\r\nf;x=" + b"y" * (1 << 20) + b"\r\n" + BODY + b"\r\n0\r\n\r\n"
    assert (await exchange_in_parts(rig.port, raw))[0] == 431


async def exchange_in_parts(port: int, raw: bytes) -> tuple[int, bytes]:
    """Status and body of the answer to what is sent 4 KiB at a time."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    async with asyncio.timeout(60):
        with contextlib.suppress(ConnectionError):
            for start in range(0, len(raw), 4096):
                writer.write(raw[start : start + 4096])
                await writer.drain()
        answer = await read_answer(reader)
    writer.close()
    return answer


@pytest.mark.parametrize("version", [b"", b" HTTP/0.9", b" HTTP/2.0"])
async def test_other_versions_are_refused(rig: HttpRig, version: bytes) -> None:
    assert (await everything(rig.port, b"GET /live" + version + b"\r\n\r\n")).startswith(b"HTTP/1.1 400 ")


async def test_chunks_with_http_1_0_are_refused(rig: HttpRig) -> None:
    raw = HEAD.replace(b"HTTP/1.1", b"HTTP/1.0") + CHUNKED + b"\r\n" + ONE_CHUNK
    assert (await everything(rig.port, raw)).partition(b"\r\n")[0].split(b" ")[1] == b"400"


@pytest.mark.parametrize(
    "chunks", [b"f;x=\r\n" + BODY + b"0\r\n\r\n", b"-1\r\n", b"fffffffffffffffff\r\n", b"g\r\n", b" f\r\n"]
)
async def test_broken_chunks_are_refused(rig: HttpRig, chunks: bytes) -> None:
    status, _ = await exchange(rig.port, HEAD + CHUNKED + b"\r\n" + chunks)
    assert status == 400


async def test_what_follows_the_body_is_no_header(rig: HttpRig) -> None:
    trailer = b"f\r\n" + BODY + b"\r\n0\r\nX-Request-Id: smuggled\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
    writer.write(HEAD + CHUNKED + b"\r\n" + trailer)
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"smuggled" not in head
    writer.close()


@pytest.mark.parametrize(
    "name", ["Authorization", "X-Admin-Key", "Content-Type", "Host", "X-Request-Id", "X-Request-Timeout-S", "Expect"]
)
async def test_a_header_that_counts_is_given_once(rig: HttpRig, name: str) -> None:
    twice = f"{name}: 1\r\n{name.upper()}: 2\r\n".encode()
    data = await everything(rig.port, b"GET /live HTTP/1.1\r\n" + twice + b"\r\n")
    assert data.startswith(b"HTTP/1.1 400 ")
    assert name.lower().encode() in data


async def test_other_headers_may_repeat(rig: HttpRig) -> None:
    assert (await exchange(rig.port, b"GET /live HTTP/1.1\r\nHost: x\r\nX-A: 1\r\nX-A: 2\r\n\r\n"))[0] == 200


@pytest.mark.parametrize(
    "lines",
    [b"X-Long: " + b"x" * limits.MAX_HEADER_BYTES + b"\r\n", b"".join(b"X-%d: y\r\n" % n for n in range(101)),
     b"Cookie: " + b"x" * 9000 + b"\r\nX-Other: " + b"x" * 9000 + b"\r\n"],
)  # fmt: skip
async def test_a_large_head_is_refused(rig: HttpRig, lines: bytes) -> None:
    status, body = await exchange(rig.port, b"GET /live HTTP/1.1\r\nHost: x\r\n" + lines + b"\r\n")
    assert (status, json.loads(body)["error"]["code"]) == (431, "header_too_large")


@pytest.mark.parametrize("start", [b"GET /", b"GET /live HTTP/1.1\r\nX: ", b"GET /live HTTP/1.1\r\n"])
async def test_a_head_without_end_is_cut_before_it_is_large(rig: HttpRig, start: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
    writer.write(start)
    num_sent, answering = 0, asyncio.ensure_future(read_answer(reader))
    filler = b"x" * 1000 if start != b"GET /live HTTP/1.1\r\n" else b"X-Y: z\r\n" * 125
    while not answering.done() and num_sent < 8 << 20:
        with contextlib.suppress(ConnectionError):
            writer.write(filler)
            await writer.drain()
        num_sent += len(filler)
        await asyncio.sleep(0)
    status, _ = await answering
    writer.close()
    assert status in (431, 0)  # 0: the answer was lost with what we still sent
    assert num_sent < 8 << 20
    assert await still_serves(rig)


async def test_a_head_of_just_the_limit_is_read(rig: HttpRig) -> None:
    filler = b"x" * (limits.MAX_HEADER_BYTES - 100)
    assert (await exchange(rig.port, b"GET /live HTTP/1.1\r\nHost: x\r\nX-L: " + filler + b"\r\n\r\n"))[0] == 200


@pytest.mark.usefixtures("short_times")
@pytest.mark.parametrize("start", [b"", b"GET /live HT", b"GET /live HTTP/1.1\r\nHost: x\r\nX-Slow: "])
async def test_a_head_that_comes_too_slowly_ends_its_connection(start: bytes) -> None:
    async with http_rig(always(ids("ok"))) as rig:
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        writer.write(start)
        status, body = await read_answer(reader)
        assert (status, json.loads(body)["error"]["code"]) == (408, "header_timeout")
        assert await reader.read() == b""
        writer.close()


@pytest.mark.usefixtures("short_times")
async def test_bytes_that_trickle_in_win_no_time() -> None:
    async with http_rig(always(ids("ok"))) as rig:
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        answering = asyncio.ensure_future(read_answer(reader))
        writer.write(b"GET /live HTTP/1.1\r\n")
        while not answering.done():
            with contextlib.suppress(ConnectionError):
                writer.write(b"X: y\r\n")
                await writer.drain()
            await asyncio.sleep(0.01)
        assert (await answering)[0] in (408, 0)
        writer.close()


@pytest.mark.usefixtures("short_times")
async def test_a_body_that_goes_on_after_its_refusal_is_cut() -> None:
    async with http_rig(always(ids("ok"))) as rig:
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        writer.write(b"POST /nowhere HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert (await read_answer(reader))[0] == 404
        ending = asyncio.ensure_future(reader.read())
        while not ending.done():
            writer.write(b"1\r\nx\r\n")
            await asyncio.sleep(0.01)
        with contextlib.suppress(ConnectionError):
            await ending
        writer.close()

        async def is_gone() -> bool:
            return rig.server.num_connections == 0

        await until(is_gone)


@pytest.mark.usefixtures("short_times")
async def test_an_idle_connection_between_requests_is_kept() -> None:
    async with http_rig(always(ids("ok"))) as rig:
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        for _ in range(2):
            writer.write(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await read_answer(reader))[0] == 200
            await asyncio.sleep(0.3)  # longer than a head may take
        writer.close()


@pytest.mark.usefixtures("short_times")
async def test_empty_lines_between_requests_hold_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "KEEP_ALIVE_TIMEOUT_S", 0.3)
    async with http_rig(always(ids("ok"))) as rig:
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        writer.write(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await read_answer(reader))[0] == 200
        ending = asyncio.ensure_future(reader.read())
        async with asyncio.timeout(60):
            while not ending.done():
                writer.write(b"\r\n")
                await asyncio.sleep(0.02)
        with contextlib.suppress(ConnectionError):
            await ending
        writer.close()


@pytest.mark.parametrize(
    "raw",
    [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\r\n\r\n\x00\x00\r\n\r\n",
     b"GET /live HTTP/9.9\r\n\r\n", b"GET http://[::1/live HTTP/1.1\r\n\r\n", b"GE\x00T /live HTTP/1.1\r\n\r\n",
     b"GET /live\x00 HTTP/1.1\r\nHost: x\r\n\r\n", b"GET /live HTTP/1.1\r\nX\x00: y\r\n\r\n",
     b"GET /live HTTP/1.1\r\nX: a\x00b\r\n\r\n"],
)  # fmt: skip
async def test_what_is_no_http_is_refused(rig: HttpRig, raw: bytes) -> None:
    assert (await everything(rig.port, raw)).startswith(b"HTTP/1.1 400 ")
    assert await still_serves(rig)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
async def test_a_body_nested_a_hundred_thousand_deep_is_refused(rig: HttpRig, path: str) -> None:
    for opening, closing in ((b"[", b"]"), (b'{"a":', b"}")):
        body = opening * 100_000 + b"1" + closing * 100_000
        reply = await rig.client.post(path, content=body, headers={"content-type": "application/json"})
        assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")
    assert await still_serves(rig)


@pytest.mark.parametrize(
    "field",
    [{"guided_regex": "["}, {"guided_regex": "(?=a)a"}, {"guided_regex": "a" * 300_000},
     {"guided_grammar": "root ::= root"},
     {"guided_json": {"$ref": "#"}}, {"guided_json": {"enum": ["x" * 300_000]}},
     {"guided_choice": ["x"] * 100_000},
     {"guided_json": {"allOf": [{"pattern": f"^{'a?' * 40}{'a' * 40}$"}, {"pattern": "^(.*){40}$"}]}},
     {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}},
     {"chat_template": "{% for x in range(10**9) %}{% endfor %}"}],
    ids=lambda field: str(field)[:40],
)  # fmt: skip
async def test_hostile_constraints_and_templates_are_refused(rig: HttpRig, field: dict[str, object]) -> None:
    before = submitted(rig)
    body = {"messages": [{"role": "user", "content": "x"}], **field}
    reply = await rig.post("/v1/chat/completions", body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"].split(".")[0] == next(iter(field))
    assert len(reply.content) < 2000
    assert submitted(rig) == before
    assert await still_serves(rig)


@pytest.mark.parametrize("pattern", ["(a+)+$", "(.*)*", "(a|a)*b"])
async def test_a_pattern_that_other_engines_backtrack_over_is_one_like_others(rig: HttpRig, pattern: str) -> None:
    reply = await rig.post("/v1/completions", {"prompt": "x", "guided_regex": pattern})
    assert reply.status_code == 200
