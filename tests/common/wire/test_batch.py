"""What travels together: all that is queued in one turn of the loop, in order, up to a bound."""

import asyncio

from common.wire.batch import MAX_BATCHED, take_batch


async def test_what_a_turn_brings_after_the_first_travels_with_it() -> None:
    """One task wakes the writer, another queues behind its back before it writes."""
    queue: asyncio.Queue[int] = asyncio.Queue()
    taking = asyncio.ensure_future(take_batch(queue))
    await asyncio.sleep(0)
    queue.put_nowait(1)
    asyncio.get_running_loop().call_soon(queue.put_nowait, 2)
    assert await taking == [1, 2]


async def test_a_batch_is_bounded_and_the_rest_comes_next_in_order() -> None:
    queue: asyncio.Queue[int] = asyncio.Queue()
    for number in range(MAX_BATCHED + 2):
        queue.put_nowait(number)
    assert await take_batch(queue) == [*range(MAX_BATCHED)]
    assert await take_batch(queue) == [MAX_BATCHED, MAX_BATCHED + 1]
