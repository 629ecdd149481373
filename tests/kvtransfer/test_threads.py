"""The pack thread and the work thread: what they promise when they are closed or when a job fails."""

import asyncio
import threading
from typing import Any

import torch

from common.values.ids import TransferId
from kvtransfer.chunk.staging import StagingPool
from kvtransfer.events import Chunk, ChunkPacked, ChunkSent, SendChunk
from kvtransfer.links.protocol import Done, LinkClosed
from kvtransfer.sender.packer import Packer
from kvtransfer.work_thread import WorkThread
from tests.kvtransfer.cluster import DECODE, new_transfer_id
from tests.kvtransfer.links.link_tools import TIMEOUT_S

T = new_transfer_id("t")


class GatedCodec:
    """Packs chunk 0 only when the gate opens; refuses chunk 7."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.has_begun = threading.Event()
        self.packed: list[int] = []

    def pack(self, _: TransferId, chunk: Chunk, __: tuple[int, ...], ___: torch.Tensor) -> None:
        self.has_begun.set()
        if chunk.seq == 7:
            raise MemoryError("no room")
        assert self.gate.wait(TIMEOUT_S)
        self.packed.append(chunk.seq)


class FakeLink:
    """Takes every message, or fails every one."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def send(self, _: torch.Tensor, done: Done) -> None:
        done(self._error)


class Rig:
    """A packer with fakes around it, and everything that it said, in order."""

    def __init__(self, error: Exception | None = None) -> None:
        self.said: list[object] = []
        self.codec, self.pool = GatedCodec(), StagingPool(0, torch.device("cpu"), is_pinned=False)
        fakes: tuple[Any, Any] = (self.codec, FakeLink(error))
        self.packer = Packer(fakes[0], self.pool, fakes[1], self.said.append, self.said.append)
        self._is_stopped = threading.Event()

    def submit(self, *seqs: int) -> None:
        for seq in seqs:
            self.packer.submit(SendChunk(DECODE, T, Chunk(seq, 0, 1, 0, 1, 100), (0,)))

    def close(self) -> None:
        def stop() -> None:
            self.said.append("stopped")
            self._is_stopped.set()

        self.packer.close(stop)

    def await_stop(self) -> None:
        assert self._is_stopped.wait(TIMEOUT_S)


def test_a_closed_packer_finishes_the_pack_under_way_and_reads_no_other_block() -> None:
    rig = Rig()
    rig.submit(0, 1, 2)
    assert rig.codec.has_begun.wait(TIMEOUT_S)
    rig.close()
    rig.codec.gate.set()
    rig.await_stop()
    assert rig.codec.packed == [0]
    assert rig.said == [ChunkPacked(T, 0), ChunkSent(T, 0), "stopped"]
    assert rig.pool.num_out == 0


def test_a_failed_pack_is_reported_and_nothing_after_it_is_sent() -> None:
    rig = Rig()
    rig.codec.gate.set()
    rig.submit(7, 8)
    assert rig.codec.has_begun.wait(TIMEOUT_S)
    rig.close()
    rig.await_stop()
    assert rig.said == ["t/0/0 chunk 7 not packed: no room", "stopped"]
    assert rig.codec.packed == []
    assert rig.pool.num_out == 0


def test_a_failed_send_is_reported_and_its_buffer_never_reused() -> None:
    rig = Rig(LinkClosed("reset"))
    rig.codec.gate.set()
    rig.submit(0)
    assert rig.codec.has_begun.wait(TIMEOUT_S)
    rig.close()
    rig.await_stop()
    assert rig.said == [ChunkPacked(T, 0), "reset", "stopped"]
    assert (rig.pool.num_out, rig.pool.kept_bytes) == (0, 0)


async def test_a_work_thread_keeps_the_order_and_goes_on_after_a_job_that_raises() -> None:
    done: list[int] = []
    heard: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: heard.append(context))
    thread = WorkThread("worker")

    def fail() -> None:
        raise RuntimeError("a bug")

    for job in (lambda: done.append(1), fail, lambda: done.append(2)):
        thread.submit(job)
    thread.close()
    await asyncio.to_thread(thread.join, TIMEOUT_S)
    await asyncio.sleep(0)
    assert done == [1, 2]
    assert [str(context["exception"]) for context in heard] == ["a bug"]
