"""What the NCCL link does around torch's group, on a group and a device that exist only here: nothing of it hangs."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch._C import _distributed_c10d as c10d

from kvtransfer.links.gloo import RECEIVER_END, SENDER_END
from kvtransfer.links.nccl import NcclPair, connect, link_over, refuse_one_gpu
from kvtransfer.links.process_group import ProcessGroupLink
from kvtransfer.links.protocol import LinkClosed
from tests.kvtransfer.links.link_tools import TIMEOUT_S, receive, send

CPU = torch.device("cpu")


class FakeCuda:
    """Streams do nothing; an event has come to pass when the operation before it has."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.threads: set[str] = set()

    def Stream(self, device: torch.device) -> str:
        return "stream"

    @contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        self.threads.add(threading.current_thread().name)
        yield

    def Event(self) -> "FakeCuda":
        return self

    def record(self, stream: str) -> None:
        return

    def query(self) -> bool:
        return self.done.is_set()


class FakeGroup:
    """Operations start at once, or where `is_met` is not set block as the making of a communicator does."""

    def __init__(self) -> None:
        self.is_met = threading.Event()
        self.is_met.set()
        self.started: list[tuple[str, int]] = []
        self.aborted_in: list[str] = []

    def send(self, buffers: list[torch.Tensor], other_end: int, tag: int) -> "FakeGroup":
        return self._start("send", other_end)

    def recv(self, buffers: list[torch.Tensor], other_end: int, tag: int) -> "FakeGroup":
        return self._start("recv", other_end)

    def _start(self, kind: str, other_end: int) -> "FakeGroup":
        self.is_met.wait(TIMEOUT_S)
        self.started.append((kind, other_end))
        return self

    def wait(self) -> None:
        """Orders streams, and returns."""

    def abort(self) -> None:
        self.aborted_in.append(threading.current_thread().name)


def new_link(limit_s: float = TIMEOUT_S) -> tuple[ProcessGroupLink, FakeGroup, FakeCuda]:
    group, cuda = FakeGroup(), FakeCuda()
    return link_over(NcclPair(group, RECEIVER_END, CPU, limit_s, cuda), group, "link"), group, cuda


def byte() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.uint8)


def test_an_operation_is_done_when_the_device_says_so() -> None:
    link, group, cuda = new_link()
    received, sent = receive(link, byte()), send(link, byte())
    assert not received.done()
    cuda.done.set()
    assert (received.result(TIMEOUT_S), sent.result(TIMEOUT_S)) == (None, None)
    assert group.started == [("recv", SENDER_END), ("send", SENDER_END)]
    link.close()
    assert link.join(TIMEOUT_S)


def test_receives_of_a_dead_peer_end_with_their_link_and_the_device_is_freed_off_the_callers_thread() -> None:
    link, group, _ = new_link()
    received = [receive(link, byte()) for _ in range(3)]
    link.close()
    for each in received:
        with pytest.raises(LinkClosed, match="given up"):
            each.result(TIMEOUT_S)
    assert link.join(TIMEOUT_S)
    assert group.aborted_in == ["link-end"]


def test_no_progress_for_the_time_out_ends_all_that_wait() -> None:
    link, group, _ = new_link(limit_s=0.01)
    first, second = receive(link, byte()), receive(link, byte())
    with pytest.raises(LinkClosed, match=r"no progress for 0\.01 s"):
        first.result(TIMEOUT_S)
    with pytest.raises(LinkClosed):
        second.result(TIMEOUT_S)
    with pytest.raises(LinkClosed):
        send(link, byte()).result(TIMEOUT_S)
    link.close()
    assert link.join(TIMEOUT_S)
    assert group.aborted_in == ["link-end"]


@pytest.mark.parametrize(("end", "operation"), [(SENDER_END, "send"), (RECEIVER_END, "recv")])
def test_the_communicator_is_made_by_a_byte_the_way_that_the_link_goes(end: int, operation: str) -> None:
    group, cuda = FakeGroup(), FakeCuda()
    cuda.done.set()
    connect(NcclPair(group, end, CPU, TIMEOUT_S, cuda), end, byte(), TIMEOUT_S)
    assert group.started == [(operation, 1 - end)]
    assert cuda.threads == {"nccl-connect"}


@pytest.mark.parametrize("is_met", [False, True], ids=["no communicator", "a communicator that carries nothing"])
def test_a_peer_that_does_not_come_ends_the_build_at_its_deadline(is_met: bool) -> None:
    group, cuda = FakeGroup(), FakeCuda()
    if not is_met:
        group.is_met.clear()
    with pytest.raises(RuntimeError, match=r"within 0\.05 s"):
        connect(NcclPair(group, SENDER_END, CPU, TIMEOUT_S, cuda), SENDER_END, byte(), 0.05)
    group.is_met.set()


def test_two_workers_on_one_gpu_are_refused_by_name_and_on_two_they_are_not() -> None:
    for uuids, problem in ((("GPU-1", "GPU-1"), "both workers are on the GPU GPU-1"), (("GPU-1", "GPU-2"), "")):
        store = c10d.HashStore()
        with ThreadPoolExecutor(2) as threads:
            ends = [threads.submit(refuse_one_gpu, store, end, uuid) for end, uuid in enumerate(uuids)]
        assert [str(end.exception() or "")[: len(problem)] for end in ends] == [problem, problem]
        assert all((end.exception() is None) == (not problem) for end in ends)
