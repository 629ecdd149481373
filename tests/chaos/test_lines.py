"""A connection that breaks under a chaos client tells who ended it, and no request is harmed by another's."""

import asyncio
import select
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager

import pytest

from tests.chaos.lines import Broken, Lines

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
BEGUN = HEAD + b"3\r\nabc\r\n"
WHOLE = BEGUN + b"0\r\n\r\n"
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Peer:
    """A server on a port of its own that does `handler` to each connection."""

    def __init__(self) -> None:
        self.num_connections = 0
        self.url = ""

    @asynccontextmanager
    async def serving(self, handler: Handler) -> AsyncIterator[Lines]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.num_connections += 1
            try:
                await handler(reader, writer)
            finally:
                writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        async with server, aclosing(Lines(10.0)) as lines:
            yield lines


async def read_request(reader: asyncio.StreamReader) -> None:
    await reader.readuntil(b"\r\n\r\n")
    await reader.readexactly(4)


async def ask(lines: Lines, url: str, on_chunk: Callable[[], None] = lambda: None) -> bytes:
    answer = b""
    async with (
        lines.one() as line,
        line.http.stream("POST", url, content=b"body", extensions=line.extensions) as reply,
    ):
        async for chunk in reply.aiter_raw():
            answer += chunk
            on_chunk()
    return answer


async def test_an_answered_line_is_used_again() -> None:
    async def answer_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(3):
            await read_request(reader)
            writer.write(WHOLE)

    peer = Peer()
    async with peer.serving(answer_all) as lines:
        assert [await ask(lines, peer.url) for _ in range(3)] == [b"abc"] * 3
    assert peer.num_connections == 1


async def test_a_reset_amid_an_answer_tells_how_much_had_come() -> None:
    has_come = asyncio.Event()

    async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(BEGUN)
        await has_come.wait()
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    peer = Peer()
    async with peer.serving(reset) as lines:
        with pytest.raises(Broken, match=r"^ReadError < .*ConnectionResetError; connection: new; .*; 3 bytes of"):
            await ask(lines, peer.url, has_come.set)


async def test_an_orderly_end_amid_an_answer_is_told_from_a_reset() -> None:
    async def end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(BEGUN)

    peer = Peer()
    async with peer.serving(end) as lines:
        with pytest.raises(Broken, match=r"^RemoteProtocolError; connection: new; .*; 3 bytes of"):
            await ask(lines, peer.url)


async def test_a_connection_closed_under_its_next_request_tells_how_long_it_was_idle() -> None:
    async def close_unread(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(WHOLE)
        while not select.select([writer.get_extra_info("socket").fileno()], [], [], 0)[0]:  # noqa: ASYNC110
            await asyncio.sleep(0)  # until the kernel has the request; there is no event for it
        writer.transport.abort()

    peer = Peer()
    async with peer.serving(close_unread) as lines:
        await ask(lines, peer.url)
        with pytest.raises(Broken, match=r"^ReadError < .*; connection: request 2, idle 0\.\d+ s before; .*; no head"):
            await ask(lines, peer.url)


async def test_a_line_that_was_closed_while_idle_is_opened_again_and_is_new() -> None:
    is_closed = asyncio.Event()

    async def answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(WHOLE if peer.num_connections < 3 else BEGUN)
        writer.close()
        await writer.wait_closed()
        is_closed.set()

    peer = Peer()
    async with peer.serving(answer_once) as lines:
        for _ in range(2):
            assert await ask(lines, peer.url) == b"abc"
            await is_closed.wait()
            is_closed.clear()
        with pytest.raises(Broken, match="connection: new; "):
            await ask(lines, peer.url)
    assert peer.num_connections == 3


async def test_a_request_that_is_left_takes_its_line_with_it() -> None:
    has_begun, has_left = asyncio.Event(), asyncio.Event()

    async def stall_first(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        if peer.num_connections > 1:
            writer.write(WHOLE)
            return
        writer.write(BEGUN)
        assert await reader.read() == b""
        has_left.set()

    peer = Peer()
    async with peer.serving(stall_first) as lines:
        leaving = asyncio.create_task(ask(lines, peer.url, has_begun.set))
        await has_begun.wait()
        leaving.cancel()
        await asyncio.wait([leaving])
        assert leaving.cancelled()
        await has_left.wait()
        assert await ask(lines, peer.url) == b"abc"
    assert peer.num_connections == 2


async def test_a_line_whose_request_failed_is_closed() -> None:
    async with aclosing(Lines(10.0)) as lines:
        with pytest.raises(ZeroDivisionError):
            async with lines.one() as line:
                raise ZeroDivisionError
        assert line.http.is_closed
