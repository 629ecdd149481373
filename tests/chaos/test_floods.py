"""A flood counts who was refused, who left in mid-answer and who lost the connection; other answers are problems."""

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.chaos.floods import Floods
from tests.chaos.ledger import Api, Entry, Outcome, Question
from tests.chaos.soak import is_refusal
from tests.cluster.load import Case

STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + b"data: {}\n\n" * 9
FULL = b'HTTP/1.1 503 Service Unavailable\r\ncontent-length: 29\r\n\r\n{"type": "server_overloaded"}'
BROKEN = b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 2\r\n\r\n{}"


@asynccontextmanager
async def answering(*answers: bytes) -> AsyncIterator[str]:
    """A server that gives these answers in turn; an empty one is a connection that breaks."""
    turn = itertools.cycle(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(next(turn))
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def flooded(*answers: bytes) -> Floods:
    """One burst, or as many as it takes for one of them to be a flood."""
    async with answering(*answers) as url:
        floods = Floods(url, random.Random(3), size=len(answers))
        await floods.run(1, time.monotonic() + 1.0)
        return floods


async def test_a_burst_of_which_some_are_refused_is_a_flood() -> None:
    floods = await flooded(STREAM, FULL, STREAM, b"")
    assert (floods.num_floods, floods.num_refused, floods.num_left, floods.num_cut) == (1, 1, 2, 1)
    assert floods.problems == []


async def test_a_burst_that_the_queue_holds_is_none_and_the_time_limits_them() -> None:
    floods = await flooded(STREAM, STREAM)
    assert floods.num_floods == 0
    assert floods.num_left >= 2


async def test_an_answer_that_is_neither_a_refusal_nor_a_stream_is_a_problem() -> None:
    floods = await flooded(BROKEN, FULL)
    assert (len(floods.problems), floods.num_refused) == (1, 1)
    assert floods.problems[0].startswith("a flood was answered 500: ")


def test_a_refusal_is_told_before_any_token() -> None:
    def ended(detail: str, outcome: Outcome = Outcome.ERROR) -> Entry:
        entry = Entry("r", Question(Case((3, 4), seed=1), (5, 6), ""), Api.HTTP_STREAM, 0.0)
        entry.end(outcome, detail)
        return entry

    assert is_refusal(ended("503 server_overloaded: 4 requests wait already"))
    assert is_refusal(ended("RESOURCE_EXHAUSTED: 4 requests wait already"))
    assert not is_refusal(ended("503 service_unavailable: the router is shutting down"))
    late = ended("RESOURCE_EXHAUSTED: x")
    late.tokens.append(5)
    assert not is_refusal(late)
