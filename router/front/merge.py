"""Joins the streams of a request with several prompts into one. Owns the tasks that read them."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

ItemT = TypeVar("ItemT")

# Readers wait when the consumer is this many items behind: a slow client slows its own request only.
_MAX_QUEUED = 64


def merged(sources: Sequence[AsyncGenerator[ItemT, None]]) -> AsyncGenerator[ItemT, None]:
    """Items of all sources in order of arrival. The first error ends all. One source is left as it is."""
    return sources[0] if len(sources) == 1 else _merged(sources)


async def _merged(sources: Sequence[AsyncGenerator[ItemT, None]]) -> AsyncGenerator[ItemT, None]:
    queue: asyncio.Queue[ItemT | Exception | None] = asyncio.Queue(_MAX_QUEUED)
    readers = [asyncio.ensure_future(_read(source, queue)) for source in sources]
    try:
        num_open = len(sources)
        while num_open:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def _read(source: AsyncGenerator[ItemT, None], queue: asyncio.Queue[ItemT | Exception | None]) -> None:
    """Pass on every item, then None or the error that ended the source."""
    try:
        async with aclosing(source):
            async for item in source:
                await queue.put(item)
    except Exception as error:
        await queue.put(error)
    else:
        await queue.put(None)
