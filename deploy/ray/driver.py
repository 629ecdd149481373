"""Makes this process a driver of Ray that keeps its own signal handlers and its own output.

Ray sets a handler of SIGTERM in Python, which ends the process with a code of its own, and one in C++, which prints a
stack trace and at times crashes. Both are made inside of `ray.init`, where a signal may come at any moment. A thread of
Ray's prints a long text on standard output whenever a worker dies; the pools say so in a line of their own.
"""

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def own_manners() -> Iterator[None]:
    """Around `ray.init`, in the main thread."""
    import ray._private.utils
    import ray._private.worker
    from ray import _raylet as untyped_raylet

    raylet: Any = untyped_raylet
    with (
        mock.patch.object(ray._private.utils, "set_sigterm_handler", _ignore),
        mock.patch.object(ray._private.worker, "listen_error_messages", _ignore),
        mock.patch.object(raylet, "CoreWorker", _with_handlers_kept(raylet.CoreWorker)),
    ):
        yield


def _ignore(*arguments: object) -> None:
    """What Ray would do here is done by us, or not at all."""


def _with_handlers_kept(make: Callable[..., Any]) -> Callable[..., Any]:
    """Signals wait while `make` runs, its threads never get one, and the handlers are afterwards what they were."""

    def made(*arguments: object, **named: object) -> Any:
        handlers = {number: signal.getsignal(number) for number in _SIGNALS}
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            return make(*arguments, **named)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    return made
