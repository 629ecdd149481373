"""Stops one thread of another process and lets the others run, as a device that never answers would."""

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator
from pathlib import Path

_PTRACE_DETACH, _PTRACE_SEIZE, _PTRACE_INTERRUPT = 17, 0x4206, 0x4207
_WALL = 0x40000000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


def thread_named(pid: int, name: str) -> int:
    """The thread of that name. Raises ProcessLookupError when there is none."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            if (task / "comm").read_text().strip() == name:
                return int(task.name)
    raise ProcessLookupError(f"process {pid} has no thread {name!r}")


def state_of(pid: int, thread: int) -> str:
    """One letter: t when it is stopped by a tracer."""
    return Path(f"/proc/{pid}/task/{thread}/stat").read_text().rpartition(")")[2].split()[0]


@contextlib.contextmanager
def stopped(thread: int) -> Iterator[None]:
    """The thread stands still until the block is left. Raises OSError when we may not trace it."""
    has_stopped, may_go = threading.Event(), threading.Event()
    errors: list[OSError] = []

    def trace() -> None:  # all calls of one tracer come from one thread
        try:
            _call(_PTRACE_SEIZE, thread)
            _call(_PTRACE_INTERRUPT, thread)
            os.waitpid(thread, _WALL)
        except OSError as error:
            errors.append(error)
            has_stopped.set()
            return
        has_stopped.set()
        may_go.wait()
        with contextlib.suppress(OSError):  # it may have been killed meanwhile
            _call(_PTRACE_DETACH, thread)

    tracer = threading.Thread(target=trace, name="tracer")
    tracer.start()
    has_stopped.wait()
    try:
        if errors:
            raise errors[0]
        yield
    finally:
        may_go.set()
        tracer.join()


def _call(request: int, thread: int) -> None:
    if _libc.ptrace(request, thread, None, None) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
