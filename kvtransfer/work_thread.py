"""One thread that does jobs in the order they were given, away from the event loop."""

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from kvtransfer.session import call_in_loop


class WorkThread:
    """Create it in the event loop's thread. A job that raises is a bug, which the loop's exception handler gets."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, job: Callable[[], None]) -> None:
        self._queue.put(job)

    def close(self) -> None:
        """End after what is queued."""
        self._queue.put(None)

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                job()
            except Exception as error:
                call_in_loop(self._loop, self._report_bug, error)

    def _report_bug(self, error: Exception) -> None:
        message = f"a job of thread {self._thread.name} failed"
        context: dict[str, Any] = {"message": message, "exception": error, "work_thread": self._thread.name}
        self._loop.call_exception_handler(context)
