"""Runs a pure core in an asyncio loop: one event at a time in, effects out, a timer for its deadline.

Owns the core; nothing else calls its `handle`. What an effect means is the shell's business (`perform`).
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

EventT = TypeVar("EventT")
EffectT = TypeVar("EffectT")
EventT_contra = TypeVar("EventT_contra", contravariant=True)
EffectT_co = TypeVar("EffectT_co", covariant=True)


class Core(Protocol[EventT_contra, EffectT_co]):
    """What every state machine of ours offers. `handle` is its only mutator."""

    def handle(self, event: EventT_contra, now_s: float) -> Sequence[EffectT_co]: ...

    def handle_deadline(self, now_s: float) -> Sequence[EffectT_co]: ...

    def next_deadline_s(self) -> float | None: ...

    def check_invariants(self) -> None: ...


class CoreLoop(Generic[EventT, EffectT]):
    """Serialises events into a core. Create it inside the running loop; close it."""

    def __init__(
        self,
        core: Core[EventT, EffectT],
        perform: Callable[[EffectT], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._perform = perform
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._pending: deque[EventT] = deque()
        self._is_handling = False
        self._is_closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_deadline_s: float | None = None
        # Set when the core or an effect raised: a bug, after which the state can't be trusted and the shell must end.
        self.failed: asyncio.Future[None] = self._loop.create_future()

    def post(self, event: EventT) -> None:
        """Handle `event` now, or right after the one being handled. Only from the loop's thread.

        Dropped after a failure: nothing may be decided on a state that can't be trusted.
        """
        if self.failed.done():
            return
        self._pending.append(event)
        if not self._is_handling:
            self._drain()

    def post_threadsafe(self, event: EventT) -> None:
        """The same from any thread. Silently dropped once the loop is closed: no handler is left."""
        self._call_threadsafe(self.post, event)

    def fail_threadsafe(self, error: BaseException) -> None:
        """`fail` from any thread, after what was posted before. Silently dropped once the loop is closed."""
        self._call_threadsafe(self.fail, error)

    def _call_threadsafe(self, action: Callable[[Any], None], argument: object) -> None:
        try:
            self._loop.call_soon_threadsafe(action, argument)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    def fail(self, error: BaseException) -> None:
        """Something around the core broke in a way that no event tells of: end as after a bug of its own."""
        if not self.failed.done():
            self.failed.set_exception(error)
            self.failed.exception()  # awaiting it raises; awaiting it is optional
        self._pending.clear()
        self.close()

    def close(self) -> None:
        """No deadline fires any more. Events are still handled: what is closed around the core tells of its end."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _drain(self) -> None:
        self._run(self._handle_pending)
        self._set_timer()

    def _handle_pending(self) -> None:
        while self._pending:
            event = self._pending.popleft()
            self._perform_all(self._core.handle(event, self._clock()))

    def _run(self, action: Callable[[], None]) -> None:
        self._is_handling = True
        try:
            action()
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            self._is_handling = False

    def _perform_all(self, effects: Sequence[EffectT]) -> None:
        for effect in effects:
            self._perform(effect)

    def _set_timer(self) -> None:
        if self._is_closed:
            return
        deadline_s = self._core.next_deadline_s()
        if deadline_s == self._timer_deadline_s and self._timer is not None:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_deadline_s = deadline_s
        if deadline_s is not None:
            self._timer = self._loop.call_later(max(0.0, deadline_s - self._clock()), self._fire)

    def _fire(self) -> None:
        self._timer = None
        self._timer_deadline_s = None
        self._run(lambda: self._perform_all(self._core.handle_deadline(self._clock())))
        self._drain()
