"""The bound on open HTTP connections: which one is ended for another, and how the last to come is refused."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from starlette.responses import PlainTextResponse

from common.telemetry.metrics import Metrics
from router.front.http import listening
from router.front.http import protocol as http_protocol
from router.front.http.connections import Connections
from router.front.http.listening import HttpServer
from router.front.ports import bind
from router.request import limits
from tests.router.front.http_rig import HttpRig, http_rig, ids, in_flight
from tests.router.front.raw_http import read_answer
from tests.router.front.scripted_service import Pause, ScriptedService, accepted, always
from tests.waiting import until

LIVE = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"
STREAM = b'{"prompt": "x", "stream": true}'
ENDLESS = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
    % (
        len(STREAM),
        STREAM,
    )
)
Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def clients(rig: HttpRig, number: int) -> AsyncIterator[list[Client]]:
    opened = [await asyncio.open_connection("127.0.0.1", rig.port) for _ in range(number)]
    yield opened
    for _, writer in opened:
        writer.close()


async def status(client: Client, request: bytes = LIVE) -> int:
    client[1].write(request)
    async with asyncio.timeout(60):
        return (await read_answer(client[0]))[0]


async def is_ended(client: Client) -> bool:
    async with asyncio.timeout(60):
        return await client[0].read() == b""


async def test_the_connection_that_waited_longest_makes_room() -> None:
    async with http_rig(always(ids("ok")), room=Connections(3)) as rig, clients(rig, 3) as (first, second, third):
        for client in (first, second, third, first):  # the second has now waited longest
            assert await status(client) == 200
        async with clients(rig, 1) as (fourth,):
            assert await status(fourth) == 200
            assert await is_ended(second)
            assert [await status(client) for client in (first, third, fourth)] == [200] * 3


async def test_half_a_head_holds_no_place() -> None:
    async with http_rig(always(ids("ok")), room=Connections(2)) as rig, clients(rig, 2) as slow:
        for _, writer in slow:
            writer.write(LIVE[:10])
            await writer.drain()
        for _ in range(3):
            async with clients(rig, 1) as (client,):
                assert await status(client) == 200


async def test_beyond_connections_with_requests_there_is_503_and_each_refusal_counts() -> None:
    metrics = Metrics("m", "router", "r")
    service = ScriptedService(lambda request: [accepted(request), Pause()])
    async with http_rig(service, room=Connections(2, metrics)) as rig, clients(rig, 2) as busy:
        for _, writer in busy:
            writer.write(ENDLESS)
        await in_flight(rig.frontend, 2)
        for _ in range(3):
            async with clients(rig, 1) as ((reader, _),):
                head = await reader.readuntil(b"\r\n\r\n")
                error = json.loads(await reader.read())["error"]
            assert head.startswith(b"HTTP/1.1 503 ")
            assert b"\r\nretry-after: 1\r\n" in head
            assert b"\r\nconnection: close\r\n" in head
            assert (error["type"], error["code"]) == ("server_overloaded", "too_many_connections")
        busy[0][1].close()
        await in_flight(rig.frontend, 1)
        async with clients(rig, 1) as (client,):
            assert await status(client) == 200
        busy[1][1].close()
        await in_flight(rig.frontend, 0)
    assert b"pdserve_admission_rejections_total{" in (text := metrics.exposition())
    assert b'reason="connections"' in text and b"} 3.0" in text


@pytest.mark.parametrize("requests", [[b""], [b"", b""], [b"Connection: close\r\n"]], ids=["idle", "piped", "closing"])
async def test_a_client_that_takes_no_answer_is_cut(monkeypatch: pytest.MonkeyPatch, requests: list[bytes]) -> None:
    monkeypatch.setattr(limits, "WRITE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(http_protocol, "_SLACK_S", 0.1)
    monkeypatch.setattr(listening, "_SWEEP_INTERVAL_S", 0.02)
    server = HttpServer(PlainTextResponse("x" * (16 << 20)), bind("127.0.0.1", 0, "--http-port"))
    serving = asyncio.ensure_future(server.serve())
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(b"".join(b"GET / HTTP/1.1\r\nHost: x\r\n" + header + b"\r\n" for header in requests))

        client.setblocking(False)
        with contextlib.suppress(ConnectionResetError):  # it was cut before this client came to read
            assert await asyncio.get_running_loop().sock_recv(client, 1) == b"H"  # and no more

        async def is_gone() -> bool:
            return server.num_connections == 0

        await until(is_gone)
    server.stop()
    await serving


class Counted:
    """A connection that says nothing."""

    def __init__(self) -> None:
        self.has_given_way = False

    def evict(self) -> None:
        self.has_given_way = True


def test_those_that_cannot_even_be_told_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_REFUSED_CONNECTIONS", 1)
    room, all_of_them = Connections(1), [Counted() for _ in range(3)]
    assert room.opened(all_of_them[0])
    room.begins(all_of_them[0])
    assert [(room.opened(each), room.is_crowded) for each in all_of_them[1:]] == [(False, False), (False, True)]
    for each in all_of_them[1:]:
        room.closed(each)
    assert not room.is_crowded
    room.waits(all_of_them[0])
    assert room.opened(Counted())
    assert [each.has_given_way for each in all_of_them] == [True, False, False]


def test_without_a_bound_nobody_gives_way() -> None:
    room, all_of_them = Connections(), [Counted() for _ in range(100)]
    assert all(room.opened(each) for each in all_of_them)
    assert not room.is_crowded
    assert not any(each.has_given_way for each in all_of_them)
