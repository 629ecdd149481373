"""What runs for a client ends when the client leaves, once, and in no other case."""

import asyncio
from collections.abc import Callable

import pytest

from router.front.http.leaving import CONNECTION_EXTENSION, ClientGone, until_disconnected


class Connection:
    """A client that leaves when the test asks."""

    may_wait = False

    def __init__(self, *, is_gone: bool = False) -> None:
        self._is_gone = is_gone
        self.on_lost: Callable[[], None] | None = None

    def abort(self) -> None:
        raise AssertionError("only its user drops a connection")

    def watch(self, on_lost: Callable[[], None] | None) -> bool:
        self.on_lost = on_lost
        return not self._is_gone

    @property
    def scope(self) -> dict[str, object]:
        return {"extensions": {CONNECTION_EXTENSION: self}}

    def leave(self) -> None:
        assert self.on_lost is not None, "no watcher"
        self.on_lost()


async def started(connection: Connection) -> asyncio.Task[None]:
    """A task inside `until_disconnected` that goes on for ever."""
    inside = asyncio.Event()

    async def run() -> None:
        async with until_disconnected(connection.scope):
            inside.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(run())
    await inside.wait()
    return task


async def test_the_client_that_leaves_ends_what_runs_however_often_it_is_said() -> None:
    connection = Connection()
    task = await started(connection)
    connection.leave()
    connection.leave()
    with pytest.raises(ClientGone):
        await task
    assert connection.on_lost is None
    assert task.cancelling() == 0


async def test_a_cancel_from_outside_is_no_client_that_leaves() -> None:
    connection = Connection()
    task = await started(connection)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert connection.on_lost is None


async def test_a_cancel_from_outside_is_not_lost_when_the_client_leaves_too() -> None:
    connection = Connection()
    task = await started(connection)
    connection.leave()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_nothing_is_begun_for_a_client_that_has_left() -> None:
    connection = Connection(is_gone=True)
    with pytest.raises(ClientGone):
        async with until_disconnected(connection.scope):
            raise AssertionError("begun")
    assert connection.on_lost is None


@pytest.mark.parametrize("error", [ClientGone(), RuntimeError("no such connection")])
async def test_a_client_that_takes_no_keep_alive_has_left(error: Exception) -> None:
    async def keep_alive() -> None:
        raise error

    with pytest.raises(ClientGone):
        async with until_disconnected(Connection().scope, keep_alive, 0.0):
            await asyncio.Event().wait()


async def test_an_answer_that_is_complete_stops_the_keep_alives() -> None:
    calls: list[int] = []
    has_called = asyncio.Event()

    async def keep_alive() -> None:
        calls.append(len(calls))
        has_called.set()

    connection = Connection()
    async with until_disconnected(connection.scope, keep_alive, 0.0):
        await has_called.wait()
    await asyncio.sleep(0)
    num_calls = len(calls)
    for _ in range(3):
        await asyncio.sleep(0)
    assert (len(calls), connection.on_lost) == (num_calls, None)
