"""What is done for a client ends when it leaves: the wait for its connection's end, beside the work. Owns nothing."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Protocol

from starlette.types import Scope

# Where the server puts the connection: a `ClientConnection`.
CONNECTION_EXTENSION = "pdserve.connection"


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


def connection_of(scope: Scope) -> ClientConnection:
    connection: ClientConnection = scope["extensions"][CONNECTION_EXTENSION]
    return connection


@asynccontextmanager
async def until_disconnected(
    scope: Scope, on_idle: Callable[[], Awaitable[None]] | None = None, idle_s: float = math.inf
) -> AsyncIterator[None]:
    """Cancels what runs inside, and raises ClientGone, when the client leaves first.

    `on_idle` is called every `idle_s`. As in `asyncio.timeout`, the caller's own task is what is cancelled: a task of
    its own for every request would cost more than parsing the request.
    """
    task, connection, is_gone = asyncio.current_task(), connection_of(scope), False
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
