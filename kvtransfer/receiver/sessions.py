"""The decode worker's shell of the handoff: the gRPC servicer that prefill workers connect to. No decisions here.

Decisions come by `perform`, in the event loop's thread. One thread posts receives (gloo's lock may be held for
milliseconds) and writes received chunks to the cache, in emitted order; each link's receiving thread decrypts them.
"""

import asyncio
from collections.abc import Callable
from typing import Any, assert_never

import grpc
import torch

from common.telemetry.logs import get_logger
from common.values.ids import WorkerRef
from common.values.ranks import Rank
from common.wire.pb import handoff_pb2_grpc
from kvtransfer import wire
from kvtransfer.chunk.codec import ChunkCodec
from kvtransfer.chunk.pack import kv_packer
from kvtransfer.events import (
    ChunkWritten,
    DiscardChunk,
    DropPeer,
    PostReceive,
    ReceiverEvent,
    SendAcknowledged,
    SendCancel,
    WriteChunk,
)
from kvtransfer.links.rendezvous import RendezvousStore
from kvtransfer.receiver.session import Context, ReceiverSession, ReceiverShared, Requests
from kvtransfer.session import STOPPING, SessionSettings, call_in_loop
from kvtransfer.work_thread import WorkThread

NetworkEffect = PostReceive | WriteChunk | DiscardChunk | SendAcknowledged | SendCancel | DropPeer
JOIN_TIMEOUT_S = 5.0
# A look at every descriptor of the process takes a millisecond.
HANG_UP_INTERVAL_S = 0.5
# Generated code has no types.
_add_to_server: Any = handoff_pb2_grpc.add_HandoffServiceServicer_to_server


class ReceiverSessions(handoff_pb2_grpc.HandoffServiceServicer):
    """Performs the receiver core's network effects. Create and call it in the event loop's thread."""

    def __init__(self, settings: SessionSettings, post: Callable[[ReceiverEvent], None]) -> None:
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._shared = ReceiverShared(
            settings,
            kv_packer(settings.cache),
            post,
            settings.new_staging_pool(),
            RendezvousStore(settings.host, settings.link_timeout_s, is_bounded=settings.transport != "nccl"),
            WorkThread("kv-receiver"),
        )
        self._peers: dict[WorkerRef, ReceiverSession] = {}
        self._is_closed = False
        self._bounding = asyncio.create_task(self._bound_store(), name="rendezvous")

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the service; before the server starts."""
        _add_to_server(self, server)

    def perform(self, effect: NetworkEffect) -> None:
        """Effects for a peer that was just lost do nothing, except that received chunks are written or discarded."""
        match effect:
            case WriteChunk():
                buffer, codec = self._shared.staged.pop((effect.peer, effect.transfer_id, effect.chunk.seq))
                self._shared.thread.submit(lambda: self._write(effect, buffer, codec))
            case DiscardChunk():
                buffer, _ = self._shared.staged.pop((effect.peer, effect.transfer_id, effect.seq))
                self._shared.pool.release(buffer)
            case PostReceive() | SendAcknowledged() | SendCancel() | DropPeer():
                if (peer := self._peers.get(effect.peer)) is not None:
                    peer.perform(effect)
            case _:
                assert_never(effect)

    async def close(self) -> None:
        """End every session and the store; waits for chunks that are being written. Later calls are refused."""
        self._is_closed = True
        self._bounding.cancel()
        await asyncio.wait({self._bounding})
        for peer in list(self._peers.values()):
            peer.end(STOPPING)
        self._shared.thread.close()
        await asyncio.to_thread(self._shared.thread.join, JOIN_TIMEOUT_S)
        self._shared.store.close()

    @property
    def is_quiet(self) -> bool:
        """After `close`: no block is written any more."""
        return not self._shared.thread.is_alive

    async def Connect(self, request_iterator: Requests, context: Context) -> None:
        """One prefill worker's control stream, until either side ends it."""
        requests = aiter(request_iterator)
        ref, rank = await self._admit(requests, context)
        if self._is_closed:
            await context.abort(grpc.StatusCode.UNAVAILABLE, STOPPING)
        if (old := self._peers.get(ref)) is not None:
            old.end("the peer connected again")
        peer = self._peers[ref] = ReceiverSession(self._shared, ref, rank, lambda: self._peers.__delitem__(ref))
        reason = await peer.run(requests, context)
        await context.abort(grpc.StatusCode.ABORTED, reason)

    async def _bound_store(self) -> None:
        while True:
            await asyncio.sleep(HANG_UP_INTERVAL_S)
            await asyncio.to_thread(self._shared.store.hang_up)

    def _write(self, effect: WriteChunk, buffer: torch.Tensor, codec: ChunkCodec) -> None:
        """In the thread: scatter, whatever has become of the peer. Ends in ChunkWritten."""
        codec.unpack(effect.chunk, effect.block_table, buffer)
        self._shared.pool.release(buffer)
        call_in_loop(self._loop, self._shared.post, ChunkWritten(effect.transfer_id, effect.chunk.seq))

    async def _admit(self, requests: Requests, context: Context) -> tuple[WorkerRef, Rank]:
        """Read the hello; refuse a worker whose KV is not ours, naming what differs and both values."""
        try:
            async with asyncio.timeout(self._settings.link_timeout_s):
                ref, fingerprint, rank = wire.parse_sender_hello(await anext(requests))
        except (ValueError, TimeoutError, StopAsyncIteration) as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error) or "no hello came")
        if mismatches := self._settings.fingerprint.mismatches(fingerprint):
            get_logger().warning("handoff_peer_refused", peer=str(ref), mismatches=mismatches)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "; ".join(mismatches))
        return ref, rank
