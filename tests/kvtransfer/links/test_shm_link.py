"""The link through shared memory: who may share it, what a peer may say, and what a dead one leaves behind."""

import fcntl
import mmap
import os
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kvtransfer.links import meeting
from kvtransfer.links.build import common_kinds
from kvtransfer.links.meeting import MEMORY_BYTES, NUM_PIECES, PIECE_BYTES, RING_BYTES, Meeting, MeetingPoint, meet
from kvtransfer.links.process_group import ProcessGroupLink
from kvtransfer.links.protocol import LinkClosed
from kvtransfer.links.shm import build_shm_link
from tests.kvtransfer.links.link_tools import TIMEOUT_S, receive, send


@pytest.fixture
def point() -> Iterator[MeetingPoint]:
    point = MeetingPoint()
    yield point
    point.close()


def both_sides(point: MeetingPoint) -> tuple[Meeting, Meeting]:
    """(receiver's, sender's)."""
    with ThreadPoolExecutor(1) as executor:
        accepted = executor.submit(point.accept, TIMEOUT_S)
        sender = meet(point.name, point.token, TIMEOUT_S)
        return accepted.result(), sender


def link_of(meeting: Meeting, *, is_sender: bool = False, timeout_s: float = TIMEOUT_S) -> ProcessGroupLink:
    return build_shm_link(meeting, is_sender=is_sender, timeout_s=timeout_s, name="link")


def zeros(num_bytes: int) -> torch.Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8)


def test_messages_larger_than_the_ring_and_empty_ones_go_both_ways(point: MeetingPoint) -> None:
    receiver, sender = both_sides(point)
    links = link_of(receiver), link_of(sender, is_sender=True)
    for there, back in (links, links[::-1]):
        for num_bytes in (0, 2 * RING_BYTES + 1, 1):
            message = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
            buffer = zeros(num_bytes)
            done = receive(back, buffer)
            send(there, message).result(TIMEOUT_S)
            done.result(TIMEOUT_S)
            assert torch.equal(buffer, message)
    for link in links:
        link.close()
        assert link.join(TIMEOUT_S)


def test_a_connection_that_shows_another_token_or_nothing_is_passed_over(point: MeetingPoint) -> None:
    silent, liar = (socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(2))
    for stranger in (silent, liar):
        stranger.connect(b"\0" + point.name.encode())
    with open(os.devnull) as one, open(os.devnull) as two:
        socket.send_fds(liar, [bytes(len(point.token))], [one.fileno(), two.fileno()])
    receiver, sender = both_sides(point)
    assert receiver.memory[:4] == bytes(4)
    sender.memory[:4] = b"here"
    assert receiver.memory[:4] == b"here"
    for stranger in (silent, liar):
        stranger.close()


@pytest.mark.parametrize("fault", ["short", "unsealed", "one descriptor"])
def test_memory_that_its_maker_could_cut_off_is_not_mapped(point: MeetingPoint, fault: str) -> None:
    """A copy out of memory that is no longer there would end the process."""
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, MEMORY_BYTES // 2 if fault == "short" else MEMORY_BYTES)
    if fault != "unsealed":
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    peer.connect(b"\0" + point.name.encode())
    lanes = socket.socketpair()
    descriptors = [descriptor] if fault == "one descriptor" else [descriptor, lanes[0].fileno()]
    socket.send_fds(peer, [point.token], descriptors)
    with pytest.raises(RuntimeError, match="did not come"):
        point.accept(0.2)
    os.close(descriptor)
    for each in (peer, *lanes):
        each.close()


def test_the_makers_memory_can_be_neither_cut_off_nor_grown(point: MeetingPoint) -> None:
    _, sender = both_sides(point)
    with pytest.raises((OSError, SystemError)):
        sender.memory.resize(MEMORY_BYTES // 2)


def test_another_users_process_is_refused_by_both_sides(point: MeetingPoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_uid_of", lambda _: os.geteuid() + 1)
    with pytest.raises(LinkClosed, match=f"user {os.geteuid() + 1}'s"):
        meet(point.name, point.token, TIMEOUT_S)
    with pytest.raises(RuntimeError, match="did not come"):
        point.accept(0.2)


def test_a_receiver_that_is_not_there_is_said_to_be_elsewhere() -> None:
    with pytest.raises(LinkClosed, match="not on this host"):
        meet("pdserve-nobody", b"", TIMEOUT_S)


def test_no_name_of_the_memory_is_in_a_file_system(point: MeetingPoint) -> None:
    """So nothing can be left there, however a process ends."""
    before = set(os.listdir("/dev/shm"))
    receiver, sender = both_sides(point)
    link = link_of(receiver)
    assert set(os.listdir("/dev/shm")) - before == set()
    lines = [line for line in Path("/proc/net/unix").read_text().splitlines() if point.name in line]
    assert lines
    assert all(line.endswith(f"@{point.name}") for line in lines)
    link.close()
    assert sender.memory is not None


def notice(num_bytes: int, length: int) -> bytes:
    return struct.pack("<QQ", num_bytes, length)


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        (notice(200, 200), "room for 100"),
        (notice(2**63, PIECE_BYTES), "room for 100"),
        (notice(100, 2**40), "a piece of"),
        (notice(100, 0), "a piece of 0"),
        (notice(100, 99), "a piece of 99"),
        (b"\xff" * 16, "room for 100"),
    ],
)
def test_a_forged_notice_ends_the_link_and_not_the_process(point: MeetingPoint, said: bytes, problem: str) -> None:
    receiver, sender = both_sides(point)
    link = link_of(receiver)
    done, later = receive(link, zeros(100)), receive(link, zeros(100))
    sender.from_sender.sendall(said)
    with pytest.raises(LinkClosed, match=problem):
        done.result(TIMEOUT_S)
    with pytest.raises(LinkClosed):
        later.result(TIMEOUT_S)
    link.close()
    assert link.join(TIMEOUT_S)


def test_a_message_that_changes_its_length_under_way_ends_the_link(point: MeetingPoint) -> None:
    receiver, sender = both_sides(point)
    link = link_of(receiver)
    done = receive(link, zeros(4 * PIECE_BYTES))
    sender.from_sender.sendall(notice(2 * PIECE_BYTES, PIECE_BYTES) + notice(3 * PIECE_BYTES, PIECE_BYTES))
    with pytest.raises(LinkClosed, match="became one of"):
        done.result(TIMEOUT_S)
    link.close()


def test_a_peer_that_frees_more_than_there_is_ends_the_link(point: MeetingPoint) -> None:
    receiver, sender = both_sides(point)
    link = link_of(sender, is_sender=True)
    send(link, zeros(3 * PIECE_BYTES)).result(TIMEOUT_S)
    receiver.from_sender.sendall(b"\1" * NUM_PIECES)
    with pytest.raises(LinkClosed, match="freed more"):
        send(link, zeros((NUM_PIECES - 2) * PIECE_BYTES)).result(TIMEOUT_S)
    link.close()


def test_whatever_is_written_over_the_memory_the_link_goes_on(point: MeetingPoint) -> None:
    """There is nothing but data in it."""
    receiver, sender = both_sides(point)
    links = link_of(receiver), link_of(sender, is_sender=True)
    receiver.memory[:] = b"\xff" * MEMORY_BYTES
    buffer = zeros(3 * PIECE_BYTES)
    done = receive(links[0], buffer)
    send(links[1], torch.full((3 * PIECE_BYTES,), 7, dtype=torch.uint8)).result(TIMEOUT_S)
    done.result(TIMEOUT_S)
    assert bool((buffer == 7).all())
    for link in links:
        link.close()


def test_a_send_that_fits_is_done_in_the_callers_thread_and_others_wait_their_turn(point: MeetingPoint) -> None:
    receiver, sender = both_sides(point)
    links = link_of(receiver), link_of(sender, is_sender=True)
    fits, too_much, behind = send(links[1], zeros(10)), send(links[1], zeros(2 * RING_BYTES)), send(links[1], zeros(10))
    assert fits.done()
    assert not behind.done()
    received: list[Future[None]] = [receive(links[0], zeros(2 * RING_BYTES)) for _ in range(3)]
    for each in (too_much, behind, *received):
        each.result(TIMEOUT_S)
    for link in links:
        link.close()


def test_a_receiver_that_stands_still_ends_a_send_at_the_time_out(point: MeetingPoint) -> None:
    receiver, sender = both_sides(point)
    link = link_of(sender, is_sender=True, timeout_s=0.2)
    with pytest.raises(LinkClosed, match="no progress"):
        send(link, zeros(2 * RING_BYTES)).result(TIMEOUT_S)
    link.close()
    assert link.join(TIMEOUT_S)
    assert receiver.memory is not None  # it was there all the time


def test_what_both_settings_allow_begins_with_what_is_wanted() -> None:
    assert common_kinds("auto", "auto") == ("shm", "gloo")
    assert common_kinds("gloo", "auto") == common_kinds("auto", "gloo") == ("gloo",)
    assert common_kinds("auto", "shm") == ("shm",)
    assert common_kinds("shm", "gloo") == common_kinds("nccl", "auto") == common_kinds("auto", "pigeon") == ()


def test_the_memory_of_a_direction_that_is_not_used_is_never_touched(point: MeetingPoint) -> None:
    receiver, sender = both_sides(point)
    links = link_of(receiver), link_of(sender, is_sender=True)
    for _ in range(20):
        done = receive(links[0], zeros(PIECE_BYTES))
        send(links[1], zeros(PIECE_BYTES))
        done.result(TIMEOUT_S)
    assert resident_bytes(receiver.memory) <= RING_BYTES
    for link in links:
        link.close()


def resident_bytes(memory: mmap.mmap) -> int:
    """Of all mappings of links' memory in this process, as the kernel counts them."""
    total, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.partition(" ")[0] and ":" not in line.partition(" ")[0]:
            is_ours = "pdserve-link" in line
        elif is_ours and line.startswith("Shared_Dirty") and len(memory):
            total = max(total, int(line.split()[1]) << 10)
    return total
