"""The HTTP connections of chaos clients, and what is known of one that broke.

A line has one connection at a time and serves one request at a time. httpx's shared pool would not do: it can close a
connection that it has given to a request (encode/httpcore#1110), and a cancelled request can keep its place for ever.
A request that was not answered to its end takes its line with it. Nothing is tried again: the router keeps an idle
connection for two minutes, a line for half a second: a request never meets the end of a time-out of the router.

How a broken line reads, by what happened (tried one by one):

* `RemoteProtocolError`: the other end closed in order, after it had read the whole request;
* `ReadError < ... < BrokenPipeError`: it had closed before the request was sent;
* `ReadError < ... < ConnectionResetError`: it closed with the request, or the rest of it, unread; or a reset;
* `ReadError < ClosedResourceError`: our own side closed it.
"""

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from itertools import groupby
from typing import Any

import httpx

KEEP_IDLE_S = 0.5


class Broken(Exception):
    """A request that ended without its answer. The message tells all that is known."""


class Line:
    """An HTTP client for one request at a time."""

    def __init__(self, timeout_s: float, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.http = httpx.AsyncClient(
            timeout=timeout_s,
            limits=httpx.Limits(keepalive_expiry=KEEP_IDLE_S),
            transport=transport,
            verify=False,  # plain HTTP; to load certificates would take longer than most requests
            trust_env=False,
            event_hooks={"response": [self._note_head]},
        )
        self.extensions = {"trace": self._note_step}  # give them to each request
        self._num_requests = 0  # on the connection that is in use
        self._idle_since_s = time.monotonic()
        self._idle_s = 0.0
        self._step = "nothing"
        self._reply: httpx.Response | None = None

    def begin(self) -> None:
        """Before each request."""
        self._idle_s = time.monotonic() - self._idle_since_s
        self._step, self._reply = "nothing", None

    def end(self) -> None:
        """After an answer that was read to its end."""
        self._idle_since_s = time.monotonic()

    async def aclose(self) -> None:
        await self.http.aclose()

    def tell(self, error: BaseException) -> str:
        """What is known of a request that ended with `error`."""
        use = "new" if self._num_requests <= 1 else f"request {self._num_requests}, idle {self._idle_s:.3f} s before"
        got = "no head" if self._reply is None else f"{self._reply.num_bytes_downloaded} bytes of the body"
        return f"{_causes(error)}; connection: {use}; at {self._step}; {got}"

    async def _note_head(self, reply: httpx.Response) -> None:
        self._reply = reply

    async def _note_step(self, name: str, info: Mapping[str, Any]) -> None:
        if name == "connection.connect_tcp.started":
            self._num_requests = 0
        elif name == "http11.send_request_headers.started":
            self._num_requests += 1
        if name.endswith((".started", ".complete")) and "response_closed" not in name:
            self._step = name


class Lines:
    """Lines that wait for their next request; the last one used is used first."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._idle: list[Line] = []

    @asynccontextmanager
    async def one(self) -> AsyncIterator[Line]:
        """A line for one request. Raises Broken when the connection broke."""
        line = self._idle.pop() if self._idle else Line(self._timeout_s)
        line.begin()
        try:
            yield line
        except (httpx.HTTPError, ConnectionError) as error:
            await line.aclose()
            raise Broken(line.tell(error)) from error
        except BaseException:
            await line.aclose()
            raise
        line.end()
        self._idle.append(line)

    async def aclose(self) -> None:
        while self._idle:
            await self._idle.pop().aclose()


def _causes(error: BaseException | None) -> str:
    """The error and what it came from, by name, each layer's copy once."""
    names: list[str] = []
    while error is not None:
        names.append(type(error).__name__)
        error = error.__cause__ or error.__context__
    return " < ".join(name for name, _ in groupby(names))
