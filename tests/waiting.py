"""Waiting for something that another process does: by its effect, never for a fixed time."""

import asyncio
from collections.abc import Awaitable, Callable

# Guards against hanging for ever. Costs nothing when things work, however busy the machine is.
LIMIT_S = 60.0


async def until(is_so: Callable[[], Awaitable[bool]], limit_s: float = LIMIT_S) -> None:
    """Return as soon as `is_so` answers True; fail after `limit_s`."""
    async with asyncio.timeout(limit_s):
        while not await is_so():  # noqa: ASYNC110 - the other side has no event to wait for
            await asyncio.sleep(0.01)
