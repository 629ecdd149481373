"""The links that need no second process: the waiting thread, and what of NCCL a CPU can show."""

import threading
from concurrent.futures import Future

import pytest
import torch

from kvtransfer.links.build import accepts_shorter
from kvtransfer.links.nccl import build_nccl_link, is_nccl_available
from kvtransfer.links.process_group import ProcessGroupLink
from kvtransfer.links.protocol import LinkClosed
from kvtransfer.links.rendezvous import RendezvousStore, join_rendezvous
from kvtransfer.links.waiter import Waiter
from tests.kvtransfer.links.link_tools import HOST, TIMEOUT_S, new_prefix, receive, send


def filled(num_bytes: int, value: int) -> torch.Tensor:
    return torch.full((num_bytes,), value, dtype=torch.uint8)


class FakeWork:
    """An operation that the test ends."""

    def __init__(self) -> None:
        self._future: Future[None] = Future()

    def wait(self) -> None:
        self._future.result(TIMEOUT_S)

    def finish(self, error: Exception | None = None) -> None:
        if error is None:
            self._future.set_result(None)
        else:
            self._future.set_exception(error)


def test_a_waiter_reports_in_the_order_of_the_operations_from_its_own_thread() -> None:
    waiter, works = Waiter("w", lambda _: None), [FakeWork() for _ in range(3)]
    reports: list[tuple[int, str]] = []
    for index, work in enumerate(works):
        waiter.add(work, filled(1, 0), lambda _, index=index: reports.append((index, threading.current_thread().name)))
    for work in reversed(works):
        work.finish()
    waiter.close()
    waiter.join()
    assert reports == [(0, "w"), (1, "w"), (2, "w")]


def test_a_failed_operation_closes_the_link_for_later_ones() -> None:
    works = [FakeWork(), FakeWork()]
    pending = iter(works)
    link = ProcessGroupLink(object(), lambda *_: next(pending), lambda *_: next(pending), "link")
    first, second = send(link, filled(1, 0)), receive(link, filled(1, 0))
    works[0].finish(RuntimeError("reset by peer\n#0 c10d::stack"))
    with pytest.raises(LinkClosed) as caught:
        first.result(TIMEOUT_S)
    assert str(caught.value) == "link-send: reset by peer"
    with pytest.raises(LinkClosed, match="reset by peer"):
        send(link, filled(1, 0)).result(TIMEOUT_S)
    works[1].finish()
    second.result(TIMEOUT_S)
    link.close()
    assert link.join(TIMEOUT_S)


def test_an_operation_that_does_not_even_start_closes_the_link() -> None:
    def refuse(*_: object) -> FakeWork:
        raise RuntimeError("pair is broken")

    link = ProcessGroupLink(object(), refuse, refuse, "link")
    for future in (send(link, filled(1, 0)), receive(link, filled(1, 0))):
        with pytest.raises(LinkClosed, match="pair is broken"):
            future.result(TIMEOUT_S)
    link.close()
    assert link.join(TIMEOUT_S)


def test_two_links_of_one_store_do_not_see_each_others_keys() -> None:
    store = RendezvousStore(HOST, TIMEOUT_S)
    one, two = (join_rendezvous(HOST, store.port, new_prefix(), TIMEOUT_S) for _ in range(2))
    one.set("rank0", "address")
    assert one.get("rank0") == b"address"
    assert not two.check(["rank0"])
    store.close()


def test_only_gloo_takes_messages_shorter_than_the_receive() -> None:
    assert accepts_shorter("gloo")
    assert not accepts_shorter("nccl")


@pytest.mark.skipif(is_nccl_available(), reason="this machine has NCCL")
def test_nccl_without_a_gpu_says_so() -> None:
    store = RendezvousStore(HOST, TIMEOUT_S)
    with pytest.raises(RuntimeError, match="needs a CUDA build"):
        build_nccl_link(join_rendezvous(HOST, store.port, new_prefix(), TIMEOUT_S), 0, torch.device("cpu"), 1.0, "n")
    store.close()
