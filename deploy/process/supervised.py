"""A service of ours through its lives: started, started again when it died, ended."""

from collections.abc import Callable

from deploy.process.child import Child, StartFailed


class Supervised:
    """Owns the process. Start it in the main thread: a child dies with the thread that made it."""

    def __init__(self, name: str, launch: Callable[[], Child], grace_s: float, max_restarts: int | None = None) -> None:
        """`grace_s`: from the request to end to the kill. `max_restarts` None = as often as it dies."""
        self.name = name
        self.num_restarts = 0
        self._launch = launch
        self._grace_s = grace_s
        self._max_restarts = max_restarts
        self._child: Child | None = None

    @property
    def has_ended(self) -> bool:
        return self._child is None or self._child.has_ended

    @property
    def pid(self) -> int:
        """Of the life that runs, or ran last."""
        assert self._child is not None
        return self._child.pid

    def start(self) -> None:
        self._child = self._launch()

    def restart(self) -> None:
        """Raises StartFailed when it dies again and again."""
        if self.num_restarts == self._max_restarts:
            raise StartFailed(f"{self.name} died {self.num_restarts} times: {self.log_tail()}")
        self.num_restarts += 1
        self.start()

    def log_tail(self, num_lines: int = 15) -> str:
        return "" if self._child is None else self._child.log_tail(num_lines)

    def terminate(self) -> None:
        """Ask it to end; returns at once."""
        if self._child is not None:
            self._child.terminate()

    def stop(self) -> None:
        """Returns when it is gone."""
        if self._child is not None:
            self._child.stop(self._grace_s)
