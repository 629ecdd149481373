"""The thread of one sender session that packs chunks and hands them to the link."""

import threading
from collections.abc import Callable
from queue import SimpleQueue

import torch

from kvtransfer.chunk.codec import ChunkCodec
from kvtransfer.chunk.staging import StagingPool
from kvtransfer.events import ChunkPacked, ChunkSent, SendChunk
from kvtransfer.links.meter import LinkMeter
from kvtransfer.links.protocol import Link


class Packer:
    """Packs in the order of `submit`, which is the announced order. Posts ChunkPacked and ChunkSent.

    `on_failure` is called, from any thread, when a pack or a send failed. `on_stopped` is called as the thread's last
    act after `close`: no block is read any more, and every ChunkPacked has been posted.
    """

    def __init__(
        self,
        codec: ChunkCodec,
        pool: StagingPool,
        link: Link,
        post: Callable[[ChunkPacked | ChunkSent], None],
        on_failure: Callable[[str], None],
    ) -> None:
        self._codec = codec
        self._pool = pool
        self._link = link
        self._post = post
        self._on_failure = on_failure
        self.meter = LinkMeter()  # of the link
        self._queue: SimpleQueue[SendChunk | None] = SimpleQueue()
        self._is_closed = False
        self._on_stopped: Callable[[], object] = lambda: None
        self._thread = threading.Thread(target=self._run, name="packer", daemon=True)
        self._thread.start()

    def submit(self, effect: SendChunk) -> None:
        self._queue.put(effect)

    def close(self, on_stopped: Callable[[], object]) -> None:
        """Pack nothing more; what is queued is dropped unread."""
        self._on_stopped = on_stopped
        self._is_closed = True
        self._queue.put(None)

    def _run(self) -> None:
        while (effect := self._queue.get()) is not None:
            if not self._is_closed:
                self._try_send(effect)
        self._on_stopped()

    def _try_send(self, effect: SendChunk) -> None:
        try:
            self._send(effect)
        except Exception as error:  # no memory for the buffer, or the device failed: the session ends, not the thread
            self._is_closed = True  # the next payloads would not be what was announced
            self._on_failure(f"{effect.transfer_id} chunk {effect.chunk.seq} not packed: {error}")

    def _send(self, effect: SendChunk) -> None:
        chunk = effect.chunk
        buffer = self._pool.acquire(chunk.num_bytes)
        try:
            self._codec.pack(effect.transfer_id, chunk, effect.block_table, buffer)
        except Exception:
            self._pool.release(buffer)
            raise
        self._post(ChunkPacked(effect.transfer_id, chunk.seq))
        self.meter.started()
        self._link.send(buffer[: chunk.num_bytes], lambda error: self._on_sent(effect, buffer, error))

    def _on_sent(self, effect: SendChunk, buffer: torch.Tensor, error: Exception | None) -> None:
        self.meter.ended(effect.chunk.num_bytes if error is None else 0)
        if error is not None:
            self._pool.forget()
            self._on_failure(str(error))
            return
        self._pool.release(buffer)
        self._post(ChunkSent(effect.transfer_id, effect.chunk.seq))
