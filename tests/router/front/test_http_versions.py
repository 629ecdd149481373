"""Clients of other versions of HTTP: those that offer a newer one, and those that know an older one only."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
import pytest_asyncio

from tests.router.front.http_rig import HttpRig, http_rig, ids
from tests.router.front.raw_http import read_answer
from tests.router.front.scripted_service import ScriptedService, always

pytestmark = pytest.mark.asyncio(loop_scope="module")
LINE = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
# What java.net.http sends.
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAA\r\n"
OFFERS = {
    "h2c": H2C,
    "several lines": b"Connection: keep-alive\r\nUPGRADE: h2c\r\nConnection: upgrade\r\n",
    "websocket": b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n",
}
PLAIN = b'{"prompt": "x"}'
STREAMED = b'{"prompt": "x", "stream": true}'
GET = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig() -> AsyncIterator[HttpRig]:
    async with http_rig(always(ids("ok"))) as rig:
        yield rig


def submitted(rig: HttpRig) -> int:
    assert isinstance(rig.frontend.service, ScriptedService)
    return len(rig.frontend.service.submitted)


def with_length(body: bytes) -> bytes:
    return b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


def in_chunks(body: bytes) -> bytes:
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:4], body[4:]))
    return b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


async def answers(port: int, segments: Sequence[bytes]) -> bytes:
    """All that comes back; the last request among `segments` must end the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.get_extra_info("socket").setsockopt(6, 1, 1)  # TCP_NODELAY: each segment travels alone
    async with asyncio.timeout(60):
        for segment in segments:
            writer.write(segment)
            await writer.drain()
            await asyncio.sleep(0)
        answer = await reader.read()
    writer.close()
    return answer


def cut(raw: bytes, size: int) -> list[bytes]:
    return [raw[start : start + size] for start in range(0, len(raw), size)]


@pytest.mark.parametrize("offer", OFFERS.values(), ids=OFFERS.keys())
@pytest.mark.parametrize("framed", [with_length, in_chunks])
@pytest.mark.parametrize("body", [PLAIN, STREAMED], ids=["whole", "streamed"])
@pytest.mark.parametrize("size", [1, 7, 4096])
async def test_an_offer_changes_nothing_of_an_answer(
    rig: HttpRig, offer: bytes, framed: object, body: bytes, size: int
) -> None:
    assert callable(framed)
    before = submitted(rig)
    last = GET + b"Connection: close\r\n\r\n"
    answer = await answers(rig.port, cut(LINE + offer + framed(body) + last, size))
    assert answer.count(b"HTTP/1.1 200 OK") == 2
    assert answer.count(b"HTTP/1.1 ") == 2
    assert b'"text":"ok"' in answer or b'"text":"o"' in answer
    assert submitted(rig) == before + 1


@pytest.mark.parametrize("offer", OFFERS.values(), ids=OFFERS.keys())
async def test_every_request_of_a_connection_may_offer(rig: HttpRig, offer: bytes) -> None:
    one = GET + offer + b"\r\n"
    last = GET + offer + b"Connection: close\r\n\r\n"
    answer = await answers(rig.port, [one + one + last])
    assert answer.count(b"HTTP/1.1 200 OK") == 3


@pytest.mark.parametrize("body", [GET + b"\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"])
@pytest.mark.parametrize("framed", [with_length, in_chunks])
@pytest.mark.parametrize("size", [1, 4096])
async def test_the_body_beside_an_offer_is_never_a_request(
    rig: HttpRig, body: bytes, framed: object, size: int
) -> None:
    assert callable(framed)
    head = LINE.replace(b"\r\nHost", b"\r\nConnection: close\r\nHost")
    answer = await answers(rig.port, cut(head + H2C + framed(body), size))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize(
    "framing",
    [b"Content-Length: 15\r\nTransfer-Encoding: chunked\r\n", b"Content-Length: 15\r\nContent-Length: 16\r\n",
     b"Transfer-Encoding: xchunked\r\n", b"Content-Length: +15\r\n"],
)  # fmt: skip
async def test_an_offer_makes_no_doubtful_framing_good(rig: HttpRig, framing: bytes) -> None:
    before = submitted(rig)
    answer = await answers(rig.port, [LINE + H2C + framing + b"\r\n" + PLAIN + GET + b"\r\n"])
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 1
    assert submitted(rig) == before


async def test_what_follows_an_offer_is_http_1_1_or_ends_the_connection(rig: HttpRig) -> None:
    answer = await answers(rig.port, [GET + H2C + b"\r\n" + b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + GET + b"\r\n"])
    assert answer.count(b"HTTP/1.1 400 ") == 1
    assert answer.count(b"HTTP/1.1 200 ") <= 1


@pytest.mark.parametrize("connection", [b"", b"Connection: keep-alive\r\n"])
@pytest.mark.parametrize("body", [PLAIN, STREAMED, b'{"prompt": 5}'], ids=["whole", "streamed", "refused"])
async def test_clients_of_http_1_0_get_no_chunks_and_a_closed_connection(
    rig: HttpRig, body: bytes, connection: bytes
) -> None:
    answer = await answers(rig.port, [LINE.replace(b"1.1", b"1.0") + connection + with_length(body)])
    head, _, content = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert b"\r\nconnection: close" in head
    if body is STREAMED:
        assert content.startswith(b"data: {")
        assert content.endswith(b"data: [DONE]\n\n")
    else:
        assert b"content-length: %d\r\n" % len(content) in head + b"\r\n"


async def test_a_body_may_begin_with_a_byte_order_mark(rig: HttpRig) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
    writer.write(LINE + with_length(b"\xef\xbb\xbf" + PLAIN))
    assert (await read_answer(reader))[0] == 200
    writer.close()
