"""The links of CPU memory against the real thing: order, failure, death of the peer, and what is left behind."""

import gc
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from common.values.ranks import Rank
from kvtransfer.links.build import build_link
from kvtransfer.links.protocol import LinkClosed
from kvtransfer.links.rendezvous import RendezvousStore
from tests.kvtransfer.links.link_tools import (
    HOST,
    TIMEOUT_S,
    RemoteEnd,
    build_both,
    build_end,
    listening_addresses,
    new_prefix,
    plan,
    receive,
    send,
)

TRANSPORTS = ("gloo", "shm")
LOOPBACK_HEX = {"0100007F", "0000000000000000FFFF00000100007F"}


@pytest.fixture
def store() -> Iterator[RendezvousStore]:
    store = RendezvousStore(HOST, TIMEOUT_S)
    yield store
    store.close()


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def filled(num_bytes: int, value: int) -> torch.Tensor:
    return torch.full((num_bytes,), value, dtype=torch.uint8)


def test_messages_in_flight_arrive_whole_and_in_order(store: RendezvousStore, transport: str) -> None:
    receiver, sender = build_both(store, new_prefix(), transport)
    sizes = [1, 64, 4096, 393_280, 17, 1 << 20, 100_000, 3]
    buffers = [filled(size, 0) for size in sizes]
    received = [receive(receiver, buffer) for buffer in buffers]
    sent = [send(sender, filled(size, value + 1)) for value, size in enumerate(sizes)]
    for future in (*received, *sent):
        future.result(TIMEOUT_S)
    for value, buffer in enumerate(buffers):
        assert bool((buffer == value + 1).all())
    for end in (receiver, sender):
        end.close()
    assert receiver.join(TIMEOUT_S)
    assert sender.join(TIMEOUT_S)


def test_store_and_link_listen_on_the_given_address_only(store: RendezvousStore) -> None:
    before = listening_addresses()
    receiver, sender = build_both(store, new_prefix())
    addresses = listening_addresses()
    for end in (receiver, sender):
        end.close()
    assert "0100007F" in addresses
    assert addresses <= LOOPBACK_HEX
    assert before <= LOOPBACK_HEX


def test_a_dropped_handle_does_not_lose_the_message(store: RendezvousStore, transport: str) -> None:
    """The caller keeps nothing of an operation: the link owns it until it is done."""
    receiver, sender = build_both(store, new_prefix(), transport)
    arrived: list[int] = []

    def start_and_forget(value: int) -> None:
        buffer = filled(1000, 0)
        receiver.receive(buffer, lambda error: arrived.append(int(buffer[0]) if error is None else -1))

    for value in range(20):
        start_and_forget(value)
    gc.collect()
    for value in range(20):
        send(sender, filled(1000, value))
    last = filled(10, 0)
    done = receive(receiver, last)
    send(sender, filled(10, 99))
    done.result(TIMEOUT_S)
    assert arrived == list(range(20))
    receiver.close()
    sender.close()


def test_a_message_longer_than_announced_is_survived_when_the_buffer_has_room(
    store: RendezvousStore, transport: str
) -> None:
    receiver, sender = build_both(store, new_prefix(), transport)
    buffer = filled(8192, 0)
    done = receive(receiver, buffer)
    send(sender, filled(5000, 1)).result(TIMEOUT_S)
    done.result(TIMEOUT_S)
    assert int(buffer.count_nonzero()) == 5000
    receiver.close()
    sender.close()


def test_closing_one_end_fails_what_is_pending_on_the_other(store: RendezvousStore, transport: str) -> None:
    receiver, sender = build_both(store, new_prefix(), transport)
    pending = [receive(receiver, filled(100, 0)) for _ in range(5)]
    sender.close()
    for future in pending:
        with pytest.raises(LinkClosed):
            future.result(TIMEOUT_S)
    with pytest.raises(LinkClosed):
        receive(receiver, filled(100, 0)).result(TIMEOUT_S)
    receiver.close()
    assert receiver.join(TIMEOUT_S)


def test_closing_both_ends_with_receives_pending_frees_everything(store: RendezvousStore, transport: str) -> None:
    receiver, sender = build_both(store, new_prefix(), transport)
    pending = receive(receiver, filled(100, 0))
    receiver.close()
    receiver.close()
    sender.close()
    with pytest.raises(LinkClosed):
        pending.result(TIMEOUT_S)
    assert receiver.join(TIMEOUT_S)
    assert sender.join(TIMEOUT_S)


def test_an_operation_after_close_fails(store: RendezvousStore, transport: str) -> None:
    receiver, sender = build_both(store, new_prefix(), transport)
    sender.close()
    with pytest.raises(LinkClosed, match="closed here"):
        send(sender, filled(10, 1)).result(TIMEOUT_S)
    receiver.close()


def test_an_absent_peer_ends_the_build_at_its_timeout(store: RendezvousStore) -> None:
    with pytest.raises(RuntimeError):
        build_link(plan(store.port, new_prefix(), 0, timeout_s=0.2))


def test_an_unknown_transport_is_refused(store: RendezvousStore) -> None:
    with pytest.raises(ValueError, match="carrier pigeon"):
        build_link(replace(plan(store.port, new_prefix(), 0), transport="carrier pigeon"))


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_a_link_of_a_worker_of_several_ranks_is_refused(store: RendezvousStore, side: str) -> None:
    wider: dict[str, Any] = {side: Rank(0, 2)}
    with pytest.raises(ValueError, match=f"no link for a {side} of 2 ranks"):
        build_link(replace(plan(store.port, new_prefix(), 0), **wider))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_peer_wakes_pending_sends_and_receives(store: RendezvousStore, transport: str, rank: int) -> None:
    prefix = new_prefix()
    with RemoteEnd(store.port, prefix, 1 - rank, transport) as remote:
        link = build_end(transport, store, prefix, rank)
        remote.await_ready()
        received = [receive(link, filled(1 << 20, 0)) for _ in range(4)]
        sent = [send(link, filled(8 << 20, 1)) for _ in range(4)]
        remote.process.kill()
        for future in (*received, *sent):
            with pytest.raises(LinkClosed):
                future.result(TIMEOUT_S)
    link.close()
    assert link.join(TIMEOUT_S)


def test_a_message_longer_than_the_room_ends_the_receiving_process_and_the_sender_hears_of_it(
    store: RendezvousStore,
) -> None:
    """Gloo throws where it cannot be caught. Such a worker is replaced, its requests replayed, as after a kill."""
    prefix = new_prefix()
    with RemoteEnd(store.port, prefix, 0) as remote:
        link = build_link(plan(store.port, prefix, 1))
        remote.await_ready()
        remote.command("receive 1000")
        sent = [send(link, filled(2000, 1)), send(link, filled(10, 1))]
        assert remote.process.wait(TIMEOUT_S) == -signal.SIGABRT
        with pytest.raises(LinkClosed):
            sent[1].result(TIMEOUT_S)
    link.close()
    assert link.join(TIMEOUT_S)


def test_a_frozen_peer_holds_a_closed_link_no_longer_than_its_timeout(store: RendezvousStore, transport: str) -> None:
    prefix = new_prefix()
    with RemoteEnd(store.port, prefix, 0, transport) as remote:
        link = build_end(transport, store, prefix, 1, timeout_s=3.0)
        remote.await_ready()
        remote.process.send_signal(signal.SIGSTOP)
        pending = send(link, filled(16 << 20, 1))
        link.close()
        with pytest.raises(LinkClosed):
            pending.result(TIMEOUT_S)
        assert link.join(TIMEOUT_S)


def test_a_pair_is_rebuilt_after_each_kill_under_a_fresh_prefix(store: RendezvousStore, transport: str) -> None:
    """The receiving process and its store live on."""
    for value in range(3):
        prefix = new_prefix()
        with RemoteEnd(store.port, prefix, 1, transport) as remote:
            link = build_end(transport, store, prefix, 0)
            remote.await_ready()
            buffer = filled(1000, 255)
            done = receive(link, buffer)
            remote.command(f"send 1000 {value}")
            done.result(TIMEOUT_S)
            assert bool((buffer == value).all())
        link.close()
        assert link.join(TIMEOUT_S)


FIFTY_LINKS = """
import asyncio
import sys
import torch
from kvtransfer.links.rendezvous import RendezvousStore
from tests.kvtransfer.links.link_tools import HOST, TIMEOUT_S, build_both, new_prefix
from tests.kvtransfer.links.link_tools import num_fds, num_threads, receive, send
from tests.waiting import until

async def main():
    store = RendezvousStore(HOST, TIMEOUT_S)

    def cycle():
        receiver, sender = build_both(store, new_prefix(), sys.argv[1])
        done = receive(receiver, torch.zeros(1000, dtype=torch.uint8))
        send(sender, torch.ones(1000, dtype=torch.uint8)).result(TIMEOUT_S)
        done.result(TIMEOUT_S)
        receive(receiver, torch.zeros(1000, dtype=torch.uint8))
        for end in (receiver, sender):
            end.close()
        assert receiver.join(TIMEOUT_S)
        assert sender.join(TIMEOUT_S)

    cycle()
    threads, fds = num_threads(), num_fds()
    for _ in range(50):
        cycle()

    async def are_gone():  # gloo ends its own a moment later
        return num_threads() <= threads + 2 and num_fds() <= fds + 2

    await until(are_gone)

asyncio.run(main())
"""


def test_fifty_links_leave_no_thread_and_no_descriptor(transport: str) -> None:
    """In a process of its own: gRPC's threads, where other tests left some, come and go as they like."""
    done = subprocess.run([sys.executable, "-c", FIFTY_LINKS, transport], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
