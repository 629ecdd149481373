"""The handoff's links beside raw gloo: two processes, one at each end, the same bytes by turns.

A round is NUM_LAYERS messages in flight at once, timed at the receiver from its first posted receive until all are
there. "raw" waits for gloo's own operations on the same group; the others go through our threads and the handoff's
codec, which encrypts and decrypts every message in that way; no rows are gathered.

    python -m tests.bench.link_bench
"""

import itertools
import os
import statistics
import subprocess
import sys
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from common.values.ids import AttemptId, RequestId, TransferId
from kvtransfer.chunk.aead import KEY_BYTES, Aead, AeadKind
from kvtransfer.chunk.codec import ChunkCodec
from kvtransfer.events import Chunk
from kvtransfer.links.gloo import RECEIVER_END, SENDER_END
from kvtransfer.links.process_group import ProcessGroupLink
from kvtransfer.links.rendezvous import RendezvousStore
from tests.kvtransfer.links.link_tools import HOST, TIMEOUT_S, build_end, new_prefix

_KEY = bytes(range(KEY_BYTES))
NUM_LAYERS, LAYER_BYTES = 30, 393_216  # 512 tokens of the demo model in bfloat16
RAW = "raw"
LINKS = ("gloo", "shm")
KINDS = tuple(f"{transport} {kind}" for transport in LINKS for kind in AeadKind)
NUM_ROUNDS, WARM_UP = 60, 5
_TRANSFER = TransferId(AttemptId(RequestId("bench"), 0), 0)
_ROOM = 64  # behind a message, for what tells a longer one
_CHUNKS = [Chunk(seq, seq, seq + 1, 0, 512, LAYER_BYTES) for seq in range(NUM_LAYERS)]


def run() -> list[dict[str, Any]]:
    """A row for each link and kind of encryption, beside raw gloo."""
    store = RendezvousStore(HOST, TIMEOUT_S)
    prefix = new_prefix()
    child = _start_sender(store.port, prefix)
    links = _build_ends(store.port, prefix, RECEIVER_END)
    try:
        rates = _measure(links, child)
    finally:
        child.kill()
        child.wait()
        for link in links.values():
            link.close()
            link.join(TIMEOUT_S)
        store.close()
    name = f"link, {NUM_LAYERS} x {LAYER_BYTES} bytes in flight,"
    return [_row(f"{name} {kind}", rates[kind], rates[RAW]) for kind in KINDS]


def _build_ends(port: int, prefix: str, end: int) -> dict[str, ProcessGroupLink]:
    return {transport: build_end(transport, port, f"{prefix}/{transport}", end) for transport in LINKS}


def _row(metric: str, ours: float, raw: float) -> dict[str, Any]:
    return {
        "metric": metric,
        "unit": "GB/s",
        "ours": ours,
        "peers": {"raw gloo": raw},
        "floor": None,
        "better": "higher",
    }


def _start_sender(port: int, prefix: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.bench.link_bench", str(port), prefix]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdin=subprocess.PIPE, text=True, env=environment)


def _measure(links: dict[str, ProcessGroupLink], child: subprocess.Popen[str]) -> dict[str, float]:
    """GB/s of each kind, the median of its rounds."""
    buffers = _buffers()
    times: dict[str, list[float]] = {kind: [] for kind in (RAW, *KINDS)}
    for number, kind in itertools.product(range(NUM_ROUNDS + WARM_UP), (RAW, *KINDS)):
        assert child.stdin is not None
        child.stdin.write(f"{kind}\n")
        child.stdin.flush()
        started_s = time.perf_counter()
        _receive_all(links, kind, buffers)
        if number >= WARM_UP:
            times[kind].append(time.perf_counter() - started_s)
    return {kind: NUM_LAYERS * LAYER_BYTES / statistics.median(each) / 1e9 for kind, each in times.items()}


def _receive_all(links: dict[str, ProcessGroupLink], kind: str, buffers: list[torch.Tensor]) -> None:
    if kind == RAW:
        _wait_for_all([links["gloo"]._group.recv([buffer[:LAYER_BYTES]], SENDER_END, 0) for buffer in buffers])
        return
    link, codec = _way(links, kind)
    arrivals = _Countdown()
    for chunk, buffer in zip(_CHUNKS, buffers, strict=True):
        codec.prepare(chunk, buffer)
        link.receive(buffer[:LAYER_BYTES], partial(_open, arrivals, codec, chunk, buffer))
    arrivals.wait()


def _open(
    arrivals: "_Countdown", codec: ChunkCodec, chunk: Chunk, buffer: torch.Tensor, error: Exception | None
) -> None:
    """In the link's thread, as in the handoff."""
    arrivals.count(error or codec.decrypt(_TRANSFER, chunk, buffer))


def _way(links: dict[str, ProcessGroupLink], kind: str) -> tuple[ProcessGroupLink, ChunkCodec]:
    transport, aead = kind.split()
    return links[transport], ChunkCodec(_NoRows(), Aead(AeadKind(aead), _KEY))


class _NoRows:
    """A `KVPacker` that leaves the buffer as it is."""

    def beside_compute(self) -> AbstractContextManager[None]:
        return nullcontext()

    def gather(self, chunk: Chunk, block_table: tuple[int, ...], out: torch.Tensor) -> None: ...

    def scatter(self, chunk: Chunk, block_table: tuple[int, ...], data: torch.Tensor) -> None: ...


class _Countdown:
    """Wakes the thread that waits for a round once, at its last message, as raw gloo's own waits end."""

    def __init__(self) -> None:
        self._missing = NUM_LAYERS
        self._problem: object = None
        self._is_over = threading.Event()

    def count(self, problem: object) -> None:
        self._problem = self._problem or problem
        self._missing -= 1
        if not self._missing:
            self._is_over.set()

    def wait(self) -> None:
        assert self._is_over.wait(TIMEOUT_S)
        assert self._problem is None, self._problem


def _wait_for_all(works: list[Any]) -> None:
    for work in works:
        work.wait()


def _buffers() -> list[torch.Tensor]:
    return [torch.ones(LAYER_BYTES + _ROOM, dtype=torch.uint8) for _ in range(NUM_LAYERS)]


def _send_all(links: dict[str, ProcessGroupLink], kind: str, buffers: list[torch.Tensor]) -> None:
    if kind == RAW:
        _wait_for_all([links["gloo"]._group.send([buffer[:LAYER_BYTES]], RECEIVER_END, 0) for buffer in buffers])
        return
    link, codec = _way(links, kind)
    sent = _Countdown()
    for chunk, buffer in zip(_CHUNKS, buffers, strict=True):
        codec.pack(_TRANSFER, chunk, (), buffer)
        link.send(buffer[:LAYER_BYTES], sent.count)
    sent.wait()


def _serve(port: int, prefix: str) -> None:
    """Send a round of the kind that each line names, until stdin ends."""
    links = _build_ends(port, prefix, SENDER_END)
    buffers = _buffers()
    for line in sys.stdin:
        _send_all(links, line.strip(), buffers)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _serve(int(sys.argv[1]), sys.argv[2])  # the sending end
    else:
        for each in run():
            ratio = each["ours"] / each["peers"]["raw gloo"]
            print(f"{each['metric']}: {each['ours']:.2f} GB/s, {ratio:.2f} of raw gloo")
