"""What ends a foreground command: Ctrl-C, SIGTERM, or the death of the process that started it."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Coroutine, Iterator
from typing import Any, NoReturn, TypeVar

ResultT = TypeVar("ResultT")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PARENT_ENDED = "the parent process ended"


class StopRequest:
    """Set once; `reason` says by what. A second signal means: don't wait for anything any more."""

    def __init__(self) -> None:
        self.reason = ""
        self._stopped = asyncio.Event()
        self._hurried = asyncio.Event()

    @property
    def is_set(self) -> bool:
        return self._stopped.is_set()

    def set(self, reason: str) -> None:
        if self.is_set:
            self._hurried.set()
        else:
            self.reason = reason
            self._stopped.set()

    async def wait(self) -> None:
        await self._stopped.wait()

    async def wait_hurried(self) -> None:
        await self._hurried.wait()


class Interrupted(KeyboardInterrupt):
    """A signal came before an event loop could listen for it. Event loops on the way let this kind through."""


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Until a loop listens (`stop_request`), SIGINT and SIGTERM raise Interrupted in the main thread."""

    def interrupt(number: int, frame: object) -> None:
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_IGN)  # what is started is being ended
        raise Interrupted(signal.Signals(number).name)

    before = {number: signal.signal(number, interrupt) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def stop_request(parent_pid: int) -> Iterator[StopRequest]:
    """Listen for as long as the block lasts. In the main thread, inside the running loop.

    `parent_pid` is the parent as it was when the command began: it may be gone by now.
    """
    loop = asyncio.get_running_loop()
    request = StopRequest()
    for number in _SIGNALS:
        loop.add_signal_handler(number, request.set, signal.Signals(number).name)
    parent = _open_parent(parent_pid)
    if parent is not None:
        loop.add_reader(parent, _on_parent_ended, loop, parent, request)
    if os.getppid() != parent_pid:
        request.set(_PARENT_ENDED)
    try:
        yield request
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
        if parent is not None:
            loop.remove_reader(parent)
            os.close(parent)


async def first_result(*awaitables: Coroutine[Any, Any, ResultT]) -> ResultT:
    """What the first to finish returns or raises; the others are cancelled and waited for."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return next(task for task in tasks if task in done).result()


async def failure_of(task: "asyncio.Task[None]") -> NoReturn:
    """Of a task that never returns: what it raises is a bug, and ends the command."""
    await asyncio.shield(task)
    raise AssertionError(f"{task.get_name()} ended")


def _open_parent(parent_pid: int) -> int | None:
    """A handle that becomes readable when the parent ends; None where that cannot be had."""
    if parent_pid <= 1 or not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(parent_pid)
    except OSError:
        return None


def _on_parent_ended(loop: asyncio.AbstractEventLoop, parent: int, request: StopRequest) -> None:
    loop.remove_reader(parent)
    request.set(_PARENT_ENDED)
