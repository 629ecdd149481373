"""Ports that torch and gloo listen on keep no stranger for long, and take none when no link is being made."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch

from kvtransfer.links.build import build_link
from kvtransfer.links.ports import connections, has_said_nothing, listeners
from kvtransfer.links.rendezvous import RendezvousStore, join_rendezvous
from tests.kvtransfer.links.link_tools import HOST, TIMEOUT_S, new_prefix, plan, receive, send
from tests.waiting import until


@pytest.fixture
def store() -> Iterator[RendezvousStore]:
    store = RendezvousStore(HOST, TIMEOUT_S, is_bounded=True)
    yield store
    store.close()


def strangers(port: int, count: int, stack: ExitStack) -> list[socket.socket]:
    """They connect and say nothing."""
    return [stack.enter_context(socket.create_connection((HOST, port), timeout=TIMEOUT_S)) for _ in range(count)]


def num_connections(port: int) -> int:
    found = connections(port)
    for each in found.values():
        each.close()
    return len(found)


def listening_ports() -> set[int]:
    found = listeners()
    for each in found.values():
        each.close()
    return set(found)


async def until_connected(port: int, count: int) -> None:
    async def is_so() -> bool:
        return num_connections(port) == count

    await until(is_so)


def takes_nobody(port: int) -> bool:
    with socket.socket() as stranger:
        stranger.settimeout(0.1)
        return stranger.connect_ex((HOST, port)) != 0


async def test_the_store_takes_nobody_while_no_link_is_made(store: RendezvousStore) -> None:
    assert takes_nobody(store.port)
    store.open()
    join_rendezvous(HOST, store.port, new_prefix(), TIMEOUT_S).set("key", "value")
    store.open()
    store.shut()
    assert not takes_nobody(store.port)
    store.shut()
    assert takes_nobody(store.port)


async def test_strangers_that_say_nothing_to_the_store_are_hung_up_and_members_are_not(store: RendezvousStore) -> None:
    """At the second look; the store's own client and one that has said something stay until no link is made."""
    own = num_connections(store.port)
    store.open()
    with ExitStack() as stack:
        strange = strangers(store.port, 20, stack)
        member = join_rendezvous(HOST, store.port, new_prefix(), TIMEOUT_S)
        member.set("key", "value")
        await until_connected(store.port, own + 21)
        store.hang_up()
        assert num_connections(store.port) == own + 21
        store.hang_up()
        assert {each.recv(1) for each in strange} == {b""}
        await until_connected(store.port, own + 1)
        assert member.get("key") == b"value"
        store.shut()
        store.hang_up()
        await until_connected(store.port, own)
    store.open()
    join_rendezvous(HOST, store.port, new_prefix(), TIMEOUT_S).set("key", "value")
    store.forget("none")


async def test_a_link_that_stands_takes_nobody_and_strangers_that_came_before_are_gone_with_it() -> None:
    store = RendezvousStore(HOST, TIMEOUT_S)
    before, prefix = listening_ports(), new_prefix()
    with ThreadPoolExecutor(2) as executor, ExitStack() as stack:
        first = executor.submit(build_link, plan(store.port, prefix, 0))

        async def listens() -> bool:
            return len(listening_ports() - before) == 1

        await until(listens)
        (port,) = listening_ports() - before
        strangers(port, 20, stack)
        await until_connected(port, 20)
        second = executor.submit(build_link, plan(store.port, prefix, 1))
        receiver, sender = first.result(), second.result()
        ports = listening_ports() - before
        assert len(ports) == 2
        assert all(takes_nobody(each) for each in ports)
        buffer = torch.zeros(1000, dtype=torch.uint8)
        done = receive(receiver, buffer)
        send(sender, torch.ones(1000, dtype=torch.uint8)).result(TIMEOUT_S)
        done.result(TIMEOUT_S)
        assert int(buffer.sum()) == 1000
        for end in (receiver, sender):
            end.close()
            assert end.join(TIMEOUT_S)
        await until_connected(port, 0)
    store.close()


def test_a_connection_is_silent_until_a_byte_has_come() -> None:
    with socket.create_server((HOST, 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted, _ = server.accept()
        with accepted:
            assert has_said_nothing(accepted)
            client.sendall(b"x")
            accepted.recv(1)
            assert not has_said_nothing(accepted)
