"""Ports that torch and gloo listen on keep no stranger for long, and take none when no link is being made."""

import os
import random
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from kvtransfer.links.build import build_link
from kvtransfer.links.ports import connections, listeners, num_bytes_received
from kvtransfer.links.rendezvous import RendezvousStore, join_rendezvous
from tests.kvtransfer.links.link_tools import HOST, TIMEOUT_S, new_prefix, num_fds, plan, receive, send, strangers_at
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
    store.open("one")
    join_rendezvous(HOST, store.port, "one", TIMEOUT_S).set("key", "value")
    store.open("two")
    store.shut()
    assert not takes_nobody(store.port)
    store.shut()
    assert takes_nobody(store.port)


async def test_strangers_that_say_nothing_to_the_store_are_hung_up_and_members_are_not(store: RendezvousStore) -> None:
    """At the second look; the store's own client and one that has said something stay until no link is made."""
    own = num_connections(store.port)
    store.open("link")
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
    store.open("another")
    join_rendezvous(HOST, store.port, "another", TIMEOUT_S).set("key", "value")
    store.forget("none")


async def test_a_link_that_stands_takes_nobody_and_strangers_that_came_before_are_gone_with_it() -> None:
    store = RendezvousStore(HOST, TIMEOUT_S)
    before, prefix = listening_ports(), new_prefix()
    with ThreadPoolExecutor(2) as executor, ExitStack() as stack:
        first = executor.submit(build_link, plan(store.port, prefix, 0))

        async def listens() -> bool:
            return store.num_keys > 1 and len(listening_ports() - before) == 1

        await until(listens)
        (port,) = listening_ports() - before
        stack.enter_context(strangers_at(HOST, port, [b""] * 20))
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


def test_a_number_that_became_a_files_while_it_was_looked_at_leaves_no_descriptor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with (tmp_path / "file").open("wb"):
        before = num_fds()
        monkeypatch.setattr(os, "readlink", lambda _: "socket:[1]")
        listening_ports()
        assert num_fds() == before


def test_what_has_come_in_on_a_connection_is_known_before_it_is_read() -> None:
    with socket.create_server((HOST, 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted, _ = server.accept()
        with accepted:
            assert num_bytes_received(accepted) == 0
            client.sendall(b"xyz")
            assert accepted.recv(1) == b"x"
            assert num_bytes_received(accepted) == 3


# ---- forged -----------------------------------------------------------------------------------------

# The store's own protocol: who asks says this number first; a command is a byte, a length eight.
HELLO = b"\x00" + (0x3C85F7CE).to_bytes(4, "little")
LENGTHS = (0, 1, 8193, 1 << 23, (1 << 23) + 1, 1 << 31, 1 << 63, (1 << 64) - 1)
COMMANDS = (*range(18), 255)


def text(word: bytes) -> bytes:
    return len(word).to_bytes(8, "little") + word


def forged() -> Iterator[bytes]:
    """Beginnings of any kind, every command with every length, and commands that do not fit what is stored."""
    rng = random.Random(16)
    yield from (rng.randbytes(length) for length in (1, 5, 64, 5000))
    yield from (HELLO[:length] for length in range(1, 5))
    for command in COMMANDS:
        yield bytes([command]) + text(b"key") * 3
        yield HELLO + bytes([command])
        for length in LENGTHS:
            yield HELLO + bytes([command]) + length.to_bytes(8, "little") + b"x" * 40
            yield HELLO + bytes([command]) + text(b"key") + length.to_bytes(8, "little") + b"x" * 40
    yield HELLO + b"\x01" + text(b"word") + text(b"no number") + b"\x04" + text(b"word") + bytes(8)
    yield HELLO + b"\x03" + text(b"nothing is stored here")
    yield HELLO + b"\x08" + text(b"nothing is stored here")


async def test_forged_bytes_and_lengths_do_not_end_the_store(store: RendezvousStore) -> None:
    """Each from a connection of its own, while a link is being made; a member is served after each kind."""
    own = num_connections(store.port)
    store.open("link")
    member = join_rendezvous(HOST, store.port, "link", TIMEOUT_S)
    with ExitStack() as stack:
        for number, frame in enumerate(forged()):
            connection = stack.enter_context(socket.create_connection((HOST, store.port), timeout=TIMEOUT_S))
            connection.sendall(frame)
            connection.shutdown(socket.SHUT_WR)
            if number % 50 == 0:
                member.set("key", str(number))
                assert member.get("key") == str(number).encode()
        join_rendezvous(HOST, store.port, "link", TIMEOUT_S).set("key", "last")
        assert member.get("key") == b"last"
        store.shut()
        store.hang_up()
    await until_connected(store.port, own)


async def test_who_says_more_than_a_link_takes_is_hung_up_and_what_it_stored_is_gone(store: RendezvousStore) -> None:
    """A link is made there afterwards as before."""
    own = num_connections(store.port)
    store.open("link")
    join_rendezvous(HOST, store.port, "link", TIMEOUT_S).set("key", "value")
    with socket.create_connection((HOST, store.port), timeout=TIMEOUT_S) as stranger:
        stranger.sendall(HELLO)
        stranger.sendall(b"".join(b"\x01" + text(b"%d" % idx) + text(bytes(10_000)) for idx in range(105)))
        nobody = join_rendezvous(HOST, store.port, "link", TIMEOUT_S)
        assert nobody.get("key") == b"value"

        async def has_come() -> bool:
            return store.num_keys > 100

        await until(has_come)
        store.hang_up()
        assert stranger.recv(1) == b""
        assert nobody.get("key") == b"value"
    store.shut()
    store.hang_up()
    await until_connected(store.port, own)
    store.hang_up()
    assert (store.num_keys, num_connections(store.port)) == (0, own)
    assert takes_nobody(store.port)
    store.open("next")
    join_rendezvous(HOST, store.port, "next", TIMEOUT_S).set("key", "value")
    assert store.num_keys == 1
