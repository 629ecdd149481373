"""One HTTP connection: what arrives is bounded in size and time, and means one thing only. Over uvicorn's protocol.

Owns the limits of a request's head and the time that a request may take to arrive. A request that two programs could
read differently (a header given twice, a transfer encoding of another kind) is refused, not interpreted: a proxy
before us must not see other requests than we do. An offer to speak another protocol (every stock Java client offers
HTTP/2) is not taken up: the request is read again without it, framed by the same parser under the same rules.
"""

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import httptools
import msgspec
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from router.front.http.connections import Connections
from router.front.http.leaving import CONNECTION_EXTENSION
from router.front.http.transport import GatheringTransport
from router.request import limits

# Told once or not at all: of two, some programs take the first and others the last.
_SINGLE = (
    *(b"authorization", b"content-encoding", b"content-length", b"content-type", b"expect", b"host"),
    *(b"transfer-encoding", b"x-admin-key", b"x-request-id", b"x-request-timeout-s"),
)
# The application ends slow bodies and streams by itself; this is for what goes on after its answer.
_SLACK_S = 5.0
_OFFER_HEADERS = (b"upgrade", b"http2-settings")
_MALFORMED = (HTTPStatus.BAD_REQUEST, "the request is no valid HTTP")
_HEAD_TOO_LARGE = (
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    f"the head of a request may have {limits.MAX_HEADER_BYTES} bytes and {limits.MAX_HEADERS} headers",
)
_HEAD_TOO_SLOW = (HTTPStatus.REQUEST_TIMEOUT, f"the head did not arrive within {limits.HEADER_TIMEOUT_S:g} s")
_NO_ROOM = (HTTPStatus.SERVICE_UNAVAILABLE, "too many connections are open")
_Problem = tuple[HTTPStatus, str]


class _Refused(Exception):
    """Stops the parser; what to answer is kept in the protocol."""


class GuardedProtocol(HttpToolsProtocol):
    """Also lets the application see whether its client reads, and cut one that stopped: closing would wait for it."""

    def __init__(self, room: Connections, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._room = room
        self._problem: _Problem = _MALFORMED
        self._num_head_bytes = 0
        self._is_in_head = True
        self._has_offer = False
        self._num_trailers = 0
        self._deadline_s: float | None = None
        self._num_unsent = 0
        self._unsent_since_s = self.loop.time()
        self._on_lost: Callable[[], None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.transport = GatheringTransport(transport, self.loop)  # type: ignore[assignment]
        self._deadline_s = self.loop.time() + limits.HEADER_TIMEOUT_S
        if not self._room.opened(self):
            self._refuse()

    def connection_lost(self, exc: Exception | None) -> None:
        self._room.closed(self)
        super().connection_lost(exc)
        if self._on_lost is not None:
            self._on_lost()

    @property
    def may_wait(self) -> bool:
        """The client is behind: the next write waits for it."""
        return bool(self.flow.write_paused)

    def abort(self) -> None:
        """Drop the connection and what waits to be sent on it."""
        self.transport.abort()

    def watch(self, on_lost: Callable[[], None] | None) -> bool:
        """Call `on_lost` when the client leaves before its answer is complete; None: no more. False: it has left."""
        self._on_lost = on_lost
        if self.transport.is_closing():
            return False
        if on_lost is not None:
            self.flow.resume_reading()  # what is not read cannot end
        return True

    def evict(self) -> None:
        """For a new connection; this one has no request."""
        self.transport.evict()  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        if (
            self._is_in_head and self._deadline_s is None
        ):  # what comes may be no head yet, and uvicorn's own timer ends with any byte
            self._deadline_s = self.loop.time() + limits.KEEP_ALIVE_TIMEOUT_S
        self._num_head_bytes += len(data)
        self._parse(data)
        if self._num_head_bytes > limits.MAX_HEADER_BYTES and not self.transport.is_closing():
            self._problem = _HEAD_TOO_LARGE
            self.send_400_response("")

    def _parse(self, data: bytes) -> None:
        """With an upgrade offered, the parser stops behind the head and gives the place."""
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                data = self._head_without_offer() + data[offer.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
            except httptools.HttpParserError:
                self.send_400_response("")
                return

    def _head_without_offer(self) -> bytes:
        """The head that was just parsed, less what offers an upgrade."""
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        for name, value in self.headers:
            if name == b"connection":
                value = b", ".join(each for each in value.split(b",") if each.strip().lower() not in _OFFER_HEADERS)
            if name not in _OFFER_HEADERS:
                lines.append(b"%b: %b" % (name, value))
        return b"\r\n".join([*lines, b"", b""])

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {CONNECTION_EXTENSION: self}  # type: ignore[dict-item]
        self._is_in_head = True
        self._has_offer = False
        self._num_trailers = 0
        self._deadline_s = self.loop.time() + limits.HEADER_TIMEOUT_S

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_head:
            super().on_header(name, value)
            return
        self._num_trailers += 1  # what comes after the body is ignored
        if self._num_trailers > limits.MAX_HEADERS:
            self._problem = _HEAD_TOO_LARGE
            raise _Refused

    def on_headers_complete(self) -> None:
        problem = self._head_problem()
        if problem is not None:
            self._problem = problem
            raise _Refused
        self._has_offer = self.parser.should_upgrade()
        if self._has_offer:
            return
        self._is_in_head = False
        self._num_head_bytes = 0
        self._deadline_s = self.loop.time() + limits.BODY_TIMEOUT_S + _SLACK_S
        self._room.begins(self)
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            _send_without_chunks(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._num_head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._has_offer:
            return
        self._num_head_bytes = 0
        self._deadline_s = None
        self._is_in_head = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self.transport.flush()  # type: ignore[attr-defined]  # before what else the end of a request brings
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self._room.waits(self)

    def send_400_response(self, msg: str) -> None:
        """What uvicorn calls when the parser gives up, in OpenAI's form and with the status that fits."""
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.abort()  # in the middle of an answer nothing else can be said
            return
        status, message = self._problem
        kind = "server_overloaded" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
        body = msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": _code(status)}})
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\nconnection: close\r\n"
        if status is HTTPStatus.SERVICE_UNAVAILABLE:
            head += "retry-after: 1\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()

    def end_if_late(self, now_s: float) -> None:
        """Call now and then: ends the connection when its client takes too long to say what it wants, or to take it."""
        if self._is_stuck(now_s):
            self.transport.abort()
        elif self._deadline_s is not None and now_s >= self._deadline_s and not self.transport.is_closing():
            self._end_late(now_s)

    def _end_late(self, now_s: float) -> None:
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if self.flow.read_paused or (self._is_in_head and is_answering):
            self._deadline_s = now_s + limits.HEADER_TIMEOUT_S  # it waits for us
        elif self._is_in_head:
            self._problem = _HEAD_TOO_SLOW
            self.send_400_response("")
        else:
            self.transport.abort()

    def _is_stuck(self, now_s: float) -> bool:
        """The client has long taken nothing of an answer, or of our goodbye: without this, both wait for ever."""
        num_unsent = self.transport.num_unsent  # type: ignore[attr-defined]
        if num_unsent != self._num_unsent or not (num_unsent or self.transport.is_closing()):
            self._num_unsent, self._unsent_since_s = num_unsent, now_s
        return bool(now_s - self._unsent_since_s >= limits.WRITE_TIMEOUT_S + _SLACK_S)

    def _refuse(self) -> None:
        if self._room.is_crowded:
            self.transport.abort()
        else:
            self._problem = _NO_ROOM
            self.send_400_response("")

    def _head_problem(self) -> _Problem | None:
        headers = self.headers
        num_bytes = len(self.url) + sum([len(name) + len(value) for name, value in headers])
        if num_bytes > limits.MAX_HEADER_BYTES or len(headers) > limits.MAX_HEADERS:
            return _HEAD_TOO_LARGE
        names = [name for name, _ in headers]
        if len(set(names)) < len(names):
            for name in _SINGLE:
                if names.count(name) > 1:
                    return HTTPStatus.BAD_REQUEST, f"header {name.decode()} is given more than once"
        return self._framing_problem()

    def _framing_problem(self) -> _Problem | None:
        """Each header is given only once; a length beside chunks is refused by the parser."""
        headers, version = dict(self.headers), self.parser.get_http_version()
        if self.parser.get_method() == b"CONNECT":
            return HTTPStatus.BAD_REQUEST, "this is no proxy"
        if version == "1.1" and b"host" not in headers:
            return HTTPStatus.BAD_REQUEST, "the host header is missing"
        encoding = headers.get(b"transfer-encoding")
        if version not in ("1.0", "1.1"):
            return HTTPStatus.BAD_REQUEST, "the version must be HTTP/1.1 or HTTP/1.0"
        if encoding is not None and (encoding.strip().lower() != b"chunked" or version != "1.1"):
            return HTTPStatus.BAD_REQUEST, "transfer-encoding must be chunked, alone, and in HTTP/1.1"
        return None


def _send_without_chunks(cycle: RequestResponseCycle) -> None:
    """HTTP/1.0 knows no chunks: an answer without a length ends with its connection, which uvicorn does not offer."""
    send, is_open_ended = cycle.send, False

    async def send_plain(message: ASGISendEvent) -> None:
        nonlocal is_open_ended
        if message["type"] == "http.response.start":
            is_open_ended = all(name.lower() != b"content-length" for name, _ in message["headers"])
            cycle.chunked_encoding = False if is_open_ended else None
        elif message["type"] == "http.response.body" and is_open_ended:
            cycle.expected_content_length = len(message["body"])
        await send(message)

    cycle.send = send_plain  # type: ignore[method-assign]


def _code(status: HTTPStatus) -> str:
    codes = {431: "header_too_large", 408: "header_timeout", 503: "too_many_connections"}
    return codes.get(status.value, "malformed_request")
