"""Whoever is not the peer gets no byte to gloo while a link is made, and is not believed in the rendezvous."""

import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from kvtransfer.links.build import build_link
from kvtransfer.links.ports import connections, is_filtered, let_speak, silence
from kvtransfer.links.rendezvous import RendezvousStore
from kvtransfer.links.sealed_store import SealedStore
from tests.kvtransfer.links.link_tools import HOST, SECRET, TIMEOUT_S, new_prefix, plan, receive, send, strangers_at
from tests.kvtransfer.links.test_ports import listening_ports
from tests.waiting import until

# gloo lets the end connect whose address is the larger: with both orders each end is once the one that listens.
OTHER_HOST = "127.0.0.2"
NUM_PAIR_NUMBERS = 4


def forgeries() -> list[bytes]:
    """gloo's number of a pair, then a header: of no kind that it knows, or of a message longer than any room for it."""
    headers = (b"\xff" * 48, struct.pack("<6q", 48 + (1 << 20), 1, 0, 0, 1 << 20, 0), b"")
    return [struct.pack("<q", number) + header for number in range(NUM_PAIR_NUMBERS) for header in headers]


def is_joined(store: RendezvousStore) -> bool:
    """Whether an end has said in the store where it listens."""
    return store.num_keys > 1  # one is the store's own


@pytest.mark.parametrize(("first_host", "second_host"), [(HOST, OTHER_HOST), (OTHER_HOST, HOST)])
async def test_strangers_at_a_link_that_is_being_made_do_not_take_the_peers_place(
    first_host: str, second_host: str
) -> None:
    store, prefix, before = RendezvousStore(HOST, TIMEOUT_S), new_prefix(), listening_ports()
    first_plan, second_plan = (
        replace(plan(store.port, prefix, end), host=host) for end, host in enumerate((first_host, second_host))
    )
    with ThreadPoolExecutor(2) as executor, ExitStack() as stack:
        first = executor.submit(build_link, first_plan)

        async def is_guarded() -> bool:
            return is_joined(store)

        await until(is_guarded)
        (port,) = listening_ports() - before
        stack.enter_context(strangers_at(first_host, port, forgeries()))
        second = executor.submit(build_link, second_plan)
        sender, receiver = second.result(), first.result()
        buffer = torch.zeros(1000, dtype=torch.uint8)
        done = receive(receiver, buffer)
        send(sender, torch.ones(1000, dtype=torch.uint8)).result(TIMEOUT_S)
        done.result(TIMEOUT_S)
        assert int(buffer.sum()) == 1000
        for end in (receiver, sender):
            end.close()
            assert end.join(TIMEOUT_S)
    store.close()


def test_who_has_another_secret_is_refused_by_name_at_both_ends() -> None:
    store, prefix = RendezvousStore(HOST, TIMEOUT_S), new_prefix()
    with ThreadPoolExecutor(2) as executor:
        ends = [
            executor.submit(build_link, replace(plan(store.port, prefix, end), secret=secret))
            for end, secret in enumerate((SECRET, b"a guess"))
        ]
        for end in ends:
            with pytest.raises(RuntimeError, match="what stands in the rendezvous is not the peer's"):
                end.result()
    store.close()


def test_only_what_the_other_end_put_in_that_place_is_believed() -> None:
    bare = HashStore()
    here, there = (SealedStore(bare, "link", SECRET) for _ in range(2))
    here.set("a", "address")
    assert there.get("a") == b"address"
    sealed = bare.get("a")
    bare.set("b", sealed)  # type: ignore[arg-type]
    bare.set("c", "a stranger's")
    bare.set("d", sealed[:-1])  # type: ignore[arg-type]
    bare.set("e", b"")  # type: ignore[arg-type]
    for key in "bcde":
        with pytest.raises(RuntimeError, match="not the peer's"):
            there.get(key)
    for stranger in (SealedStore(bare, "another link", SECRET), SealedStore(bare, "link", b"a guess")):
        with pytest.raises(RuntimeError, match="not the peer's"):
            stranger.get("a")


def test_what_comes_on_a_silenced_connection_is_read_when_it_may_speak_and_an_end_is_seen_before() -> None:
    with socket.create_server((HOST, 0)) as server:
        server.settimeout(TIMEOUT_S)
        assert silence(server)
        with socket.create_connection(server.getsockname()) as peer, socket.create_connection(server.getsockname()):
            accepted, address = server.accept()
            other, _ = server.accept()
            with accepted, other:
                peer.sendall(b"word")
                found = connections(server.getsockname()[1])
                assert all(map(is_filtered, found.values()))
                let_speak(found[address])
                accepted.settimeout(TIMEOUT_S)
                assert accepted.recv(4) == b"word"
                for each in found.values():
                    each.close()
                other.settimeout(0.0)
                with pytest.raises(BlockingIOError):
                    other.recv(1)
