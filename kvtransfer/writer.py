"""The thread that scatters received chunks into the cache, for all sessions of a worker, in emitted order."""

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch

from kvtransfer.codec import ChunkCodec
from kvtransfer.events import ChunkWritten, WriteChunk
from kvtransfer.session import call_in_loop
from kvtransfer.staging import StagingPool

_Job = tuple[WriteChunk, torch.Tensor, ChunkCodec, StagingPool]


class Writer:
    """Every WriteChunk ends in ChunkWritten, whatever has become of its peer. A write that raises is a bug of ours."""

    def __init__(self, post: Callable[[ChunkWritten], None]) -> None:
        self._post = post
        self._loop = asyncio.get_running_loop()
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kv-writer", daemon=True)
        self._thread.start()

    def submit(self, effect: WriteChunk, buffer: torch.Tensor, codec: ChunkCodec, pool: StagingPool) -> None:
        self._queue.put((effect, buffer, codec, pool))

    def close(self) -> None:
        """End after what is queued."""
        self._queue.put(None)

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                self._write(*job)
            except Exception as error:
                call_in_loop(self._loop, self._report_bug, error)

    def _write(self, effect: WriteChunk, buffer: torch.Tensor, codec: ChunkCodec, pool: StagingPool) -> None:
        codec.unpack(effect.chunk, effect.block_table, buffer)
        pool.release(buffer)
        call_in_loop(self._loop, self._post, ChunkWritten(effect.transfer_id, effect.chunk.seq))

    def _report_bug(self, error: Exception) -> None:
        context: dict[str, Any] = {"message": "a chunk could not be written", "exception": error}
        self._loop.call_exception_handler(context)
