"""Answers that a client may leave before their end: server-sent events, and the wait for a whole answer.

Owns the connection of one request: it sees the client leave (streaming or not), keeps idle streams alive with
comments, and cuts a client that stopped reading.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from common.values.errors import PdserveError
from router.front.http.io import error_body, error_response, rates_of
from router.observe.error_reports import internal_error
from router.request import limits

KEEP_ALIVE = b": keep-alive\n\n"
# Where the server puts the connection: a `ClientConnection`.
CONNECTION_EXTENSION = "pdserve.connection"
DONE = b"data: [DONE]\n\n"
# Line ends for `str.splitlines`, though not for JSON: a client that splits that way must not cut an event.
_LINE_ENDS = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))
_encoder = msgspec.json.Encoder()


class ClientGone(Exception):
    """The client closed the connection, or stopped reading."""


class ClientConnection(Protocol):
    """What the server offers of a request's connection, under CONNECTION_EXTENSION of its scope."""

    @property
    def may_wait(self) -> bool:
        """Whether the next write may have to wait for the client."""
        ...

    def abort(self) -> None:
        """Drop the connection and what waits to be sent on it."""
        ...

    def watch(self, on_lost: Callable[[], None] | None) -> bool:
        """Have `on_lost` called when the client leaves; None: no more. False: it has left."""
        ...


def _connection_of(scope: Scope) -> ClientConnection:
    connection: ClientConnection = scope["extensions"][CONNECTION_EXTENSION]
    return connection


def sse_frame(value: object, name: str = "") -> bytes:
    """One server-sent event."""
    data = _on_one_line(_encoder.encode(value))
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data) if name else b"data: %b\n\n" % data


def sse_text(text: str) -> bytes:
    """A text as it stands in an event, quotes included."""
    return _on_one_line(_encoder.encode(text))


def _on_one_line(data: bytes) -> bytes:
    if not data.isascii():
        for raw, escaped in _LINE_ENDS:
            data = data.replace(raw, escaped)
    return data


@asynccontextmanager
async def until_disconnected(
    scope: Scope, on_idle: Callable[[], Awaitable[None]] | None = None, idle_s: float = math.inf
) -> AsyncIterator[None]:
    """Cancels what runs inside, and raises ClientGone, when the client leaves first.

    `on_idle` is called every `idle_s`. As in `asyncio.timeout`, the caller's own task is what is cancelled: a task of
    its own for every request would cost more than parsing the request.
    """
    task, connection, is_gone = asyncio.current_task(), _connection_of(scope), False
    assert task is not None

    def leave(_: object = None) -> None:
        nonlocal is_gone
        if not is_gone:
            is_gone = True
            task.cancel()

    pinging = None if on_idle is None else asyncio.ensure_future(_repeat(on_idle, idle_s))
    if pinging is not None:
        pinging.add_done_callback(leave)  # a keep-alive that could not be written: the client is gone as well
    try:
        if not connection.watch(leave):
            raise ClientGone
        yield
    except asyncio.CancelledError:
        if is_gone and task.uncancel() == 0:
            raise ClientGone from None
        raise
    finally:
        connection.watch(None)
        if pinging is not None:
            pinging.remove_done_callback(leave)
            pinging.cancel()


async def _repeat(action: Callable[[], Awaitable[None]], interval_s: float) -> None:
    """Until it fails."""
    with contextlib.suppress(Exception):
        while True:
            await asyncio.sleep(interval_s)
            await action()


class EventStream(Response):
    """A stream of server-sent events from `frames`, made by the client's leaving into a cancelled generator.

    Nothing is sent before the first frame or keep-alive, so that an error before it still has its HTTP status.
    An error after it is one `error` event, and the stream ends without [DONE].
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        stream_headers: Callable[[], dict[str, str]],
        request_id: str,
        keep_alive_s: float,
    ) -> None:
        super().__init__()
        self._frames = frames
        self._stream_headers = stream_headers
        self._request_id = request_id
        self._keep_alive_s = keep_alive_s
        self._lock = asyncio.Lock()
        self._is_started = False
        self._written_s = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def keep_alive() -> None:
            if time.monotonic() - self._written_s >= self._keep_alive_s / 2:
                await self._write(scope, send, KEEP_ALIVE)

        try:
            async with until_disconnected(scope, keep_alive, self._keep_alive_s):
                await self._answer(scope, receive, send)
        except ClientGone:
            _connection_of(scope).abort()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._frames):
                async for frame in self._frames:
                    await self._write(scope, send, frame)
        except PdserveError as error:
            await self._fail(error, scope, receive, send)
        except ClientGone:
            raise
        except Exception as error:
            await self._fail(internal_error(error), scope, receive, send)
        else:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _fail(self, error: PdserveError, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._is_started:
            await error_response(error, self._request_id, rates_of(scope))(scope, receive, send)
            return
        await self._write(scope, send, sse_frame(error_body(error)), more_body=False)

    async def _write(self, scope: Scope, send: Send, data: bytes, *, more_body: bool = True) -> None:
        async with self._lock:
            if not self._is_started:
                self._is_started = True
                await _send_in_time(scope, send, self._start())
            await _send_in_time(scope, send, {"type": "http.response.body", "body": data, "more_body": more_body})
            self._written_s = time.monotonic()

    def _start(self) -> Message:
        headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
        headers |= {"x-accel-buffering": "no", **self._stream_headers()}
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        return {"type": "http.response.start", "status": 200, "headers": raw}


async def _send_in_time(scope: Scope, send: Send, message: Message) -> None:
    """Raises ClientGone when the client takes nothing for too long."""
    if not _connection_of(scope).may_wait:  # a timer for each write costs more than the write
        await send(message)
        return
    try:
        async with asyncio.timeout(limits.WRITE_TIMEOUT_S):
            await send(message)
    except TimeoutError:
        raise ClientGone from None
