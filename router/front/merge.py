"""Joins the streams of a request with several prompts into one. Owns the tasks that read them."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

ItemT = TypeVar("ItemT")

# Readers wait when the consumer is this many items behind: a slow client slows its own request only.
_MAX_QUEUED = 64


async def merged(sources: Sequence[AsyncGenerator[ItemT, None]]) -> AsyncGenerator[tuple[int, ItemT], None]:
    """Items of all sources with the source's index, in order of arrival. The first error ends all."""
    if len(sources) == 1:
        async with aclosing(sources[0]) as source:
            async for only in source:
                yield 0, only
        return
    queue: asyncio.Queue[tuple[int, ItemT | Exception | None]] = asyncio.Queue(_MAX_QUEUED)
    readers = [asyncio.ensure_future(_read(idx, source, queue)) for idx, source in enumerate(sources)]
    try:
        num_open = len(sources)
        while num_open:
            idx, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield idx, item
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def _read(
    idx: int, source: AsyncGenerator[ItemT, None], queue: asyncio.Queue[tuple[int, ItemT | Exception | None]]
) -> None:
    """Pass on every item, then None or the error that ended the source."""
    try:
        async with aclosing(source):
            async for item in source:
                await queue.put((idx, item))
    except Exception as error:
        await queue.put((idx, error))
    else:
        await queue.put((idx, None))
