"""A request's events on their way to its front end. Owned by the event loop's thread."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from router.core.generation import Failed, Finished, GenerationEvent, Tokens


class GenerationStream(AsyncIterator[GenerationEvent]):
    """What the core delivers and the front end reads. Tokens that wait are joined, so a slow reader costs little."""

    def __init__(self) -> None:
        self._events: deque[GenerationEvent] = deque()
        self._has_news = asyncio.Event()
        self._has_ended = False

    def push(self, event: GenerationEvent) -> None:
        """Add an event; nothing comes after Finished or Failed."""
        assert not self._has_ended, f"{event} after the last event"
        self._has_ended = isinstance(event, Finished | Failed)
        last = self._events[-1] if self._events else None
        if isinstance(event, Tokens) and isinstance(last, Tokens):
            self._events[-1] = Tokens(last.tokens + event.tokens)
        else:
            self._events.append(event)
        self._has_news.set()

    async def __anext__(self) -> GenerationEvent:
        while not self._events:
            if self._has_ended:
                raise StopAsyncIteration
            self._has_news.clear()
            await self._has_news.wait()
        return self._events.popleft()
