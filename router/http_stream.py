"""Answers that a client may leave before their end: server-sent events, and the wait for a whole answer.

Owns the connection of one request: it sees the client leave (streaming or not), keeps idle streams alive with
comments, and cuts a client that stopped reading.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from common.errors import PdserveError
from router import limits
from router.error_reports import internal_error
from router.http_io import error_body, error_response, rates_of

KEEP_ALIVE = b": keep-alive\n\n"
# What the server tells of the connection: "abort" drops it, "flow.write_paused" is set while the client is behind.
CONNECTION_EXTENSION = "pdserve.connection"
DONE = b"data: [DONE]\n\n"
# Line ends for `str.splitlines`, though not for JSON: a client that splits that way must not cut an event.
_LINE_ENDS = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))
_encoder = msgspec.json.Encoder()


class ClientGone(Exception):
    """The client closed the connection, or stopped reading."""


def abort_connection(scope: Scope) -> None:
    """Drop the connection and what waits to be sent on it, where the server offers that."""
    extension = scope.get("extensions", {}).get(CONNECTION_EXTENSION)
    if extension is not None:
        extension["abort"]()


def _may_wait(scope: Scope) -> bool:
    """Whether the next write may have to wait for the client; a timer for each that can't costs more than the write."""
    extension = scope.get("extensions", {}).get(CONNECTION_EXTENSION)
    return extension is None or extension["flow"].write_paused


def sse_frame(value: object) -> bytes:
    """One server-sent event."""
    data = _encoder.encode(value)
    if not data.isascii():
        for raw, escaped in _LINE_ENDS:
            data = data.replace(raw, escaped)
    return b"data: %b\n\n" % data


async def _nothing() -> None:
    """A whole answer has nothing to say before its end."""


@asynccontextmanager
async def until_disconnected(
    receive: Receive, on_idle: Callable[[], Awaitable[None]] = _nothing, idle_s: float | None = None
) -> AsyncIterator[None]:
    """Cancels what runs inside, and raises ClientGone, when the client leaves first.

    `on_idle` is called every `idle_s` while the client is quiet. As in `asyncio.timeout`, the caller's own task is
    what is cancelled: a task of its own for every request would cost more than parsing the request.
    """
    task = asyncio.current_task()
    assert task is not None
    watcher = asyncio.ensure_future(_watch(receive, on_idle, idle_s))
    watcher.add_done_callback(_cancel := partial(_leave, task))
    try:
        yield
    except asyncio.CancelledError:
        if watcher.done() and task.uncancel() == 0:
            raise ClientGone from None
        raise
    finally:
        watcher.remove_done_callback(_cancel)
        watcher.cancel()


def _leave(task: asyncio.Task[Any], watcher: asyncio.Future[None]) -> None:
    if not watcher.cancelled():
        watcher.exception()  # a keep-alive that could not be written: the client is gone as well
    task.cancel()


async def _watch(receive: Receive, on_idle: Callable[[], Awaitable[None]], idle_s: float | None) -> None:
    """Return when the client has left."""
    while True:
        try:
            async with asyncio.timeout(idle_s):
                if (await receive())["type"] == "http.disconnect":
                    return
        except TimeoutError:
            await on_idle()


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
            async with until_disconnected(receive, keep_alive, self._keep_alive_s):
                await self._answer(scope, receive, send)
        except ClientGone:
            abort_connection(scope)

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
    if not _may_wait(scope):
        await send(message)
        return
    try:
        async with asyncio.timeout(limits.WRITE_TIMEOUT_S):
            await send(message)
    except TimeoutError:
        raise ClientGone from None
