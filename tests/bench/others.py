"""How much of the machine others took while something was measured: other programs, and the host (steal time).

Counted in cores, from the machine's busy time less that of our own process and all below it.
"""

import threading

import psutil

# Above this many cores a row is marked: one core in ten of a small machine shows in the figures of two threads.
DISTURBED = 0.2
INTERVAL_S = 1.0


class Others:
    """A context manager. After it, `own_s` and `others_s` are processor seconds, `cores` the mean that others took.

    Processes that came and went between two looks are taken for others.
    """

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._own: dict[int, float] = {}
        self.own_s = self.others_s = self.cores = 0.0

    def __enter__(self) -> "Others":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def is_disturbing(self) -> bool:
        return self.cores > DISTURBED

    def _watch(self) -> None:
        # What our processes had used before is not of this block.
        before = self._tree_s()
        busy_s, whole_s = _machine_s()
        while not self._stop.wait(INTERVAL_S):
            self._tree_s()
        self.own_s = self._tree_s() - before
        busy_now_s, whole_now_s = _machine_s()
        elapsed_s = (whole_now_s - whole_s) / (psutil.cpu_count() or 1)
        self.others_s = max(0.0, busy_now_s - busy_s - self.own_s)
        self.cores = self.others_s / elapsed_s if elapsed_s > 0 else 0.0

    def _tree_s(self) -> float:
        """Processor seconds of this process and all that were ever seen below it."""
        root = psutil.Process()
        for process in (root, *root.children(recursive=True)):
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            self._own[process.pid] = times.user + times.system
        return sum(self._own.values())


def _machine_s() -> tuple[float, float]:
    """(busy, all) processor seconds since the machine started, the host's share of them included."""
    times = psutil.cpu_times()
    whole = sum(times[:8]) if len(times) >= 8 else sum(times)
    return whole - times.idle - getattr(times, "iowait", 0.0), whole
