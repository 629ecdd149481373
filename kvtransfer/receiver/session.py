"""The decode worker's session with one prefill worker: its control stream and link, from its hello to PeerLost.

Torn down, and PeerLost posted, at once in the event loop's thread; a receive that ends later is dropped there.
"""

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, assert_never

import torch

from common.telemetry.logs import get_logger
from common.values.ids import TransferId, WorkerRef
from common.values.ranks import Rank
from common.wire.pb import handoff_pb2 as pb
from kvtransfer import wire
from kvtransfer.chunk.aead import KEY_BYTES, Aead
from kvtransfer.chunk.codec import ChunkCodec
from kvtransfer.chunk.pack import KVPacker
from kvtransfer.chunk.staging import StagingPool
from kvtransfer.events import (
    ChunkReceived,
    DropPeer,
    PeerLost,
    PeerReady,
    PostReceive,
    ReceiverEvent,
    SendAcknowledged,
    SendCancel,
)
from kvtransfer.links.build import LinkPlan, accepts_shorter, common_kinds, held_bytes
from kvtransfer.links.gloo import RECEIVER_END
from kvtransfer.links.meeting import MeetingPoint, has_shared_memory
from kvtransfer.links.protocol import Link
from kvtransfer.links.rendezvous import RendezvousStore
from kvtransfer.session import (
    MAX_QUEUED_MESSAGES,
    SessionEnded,
    SessionSettings,
    build_link_off_loop,
    call_in_loop,
    describe_end,
    link_prefix,
    raise_if_bug,
)
from kvtransfer.work_thread import WorkThread

Requests = AsyncIterator[pb.ConnectRequest]
# grpc.aio has no type stubs.
Context = Any
_EPOCH = re.compile("[0-9a-f]{16}")


@dataclass(slots=True)
class ReceiverShared:
    """What the sessions of one worker share. Owned by `ReceiverSessions`.

    `staged` holds chunks that ChunkReceived reported, until WriteChunk or DiscardChunk takes them: they belong to
    no session, because they are written even when their peer is lost meanwhile.
    """

    settings: SessionSettings
    kv_packer: KVPacker
    post: Callable[[ReceiverEvent], None]
    pool: StagingPool
    store: RendezvousStore
    thread: WorkThread
    staged: dict[tuple[WorkerRef, TransferId, int], tuple[torch.Tensor, ChunkCodec]] = field(default_factory=dict)


class ReceiverSession:
    """One peer's session. `_outcome` is what ends it: the first reason wins."""

    def __init__(self, shared: ReceiverShared, peer: WorkerRef, rank: Rank, on_ended: Callable[[], None]) -> None:
        """`rank`: the peer's."""
        self._shared = shared
        self._settings = shared.settings
        self._peer = peer
        self._peer_rank = rank
        self._on_ended = on_ended
        self._loop = asyncio.get_running_loop()
        self._key = secrets.token_bytes(KEY_BYTES)
        self._outbox: asyncio.Queue[pb.ConnectResponse] = asyncio.Queue(MAX_QUEUED_MESSAGES)
        self._outcome: asyncio.Future[str] = self._loop.create_future()
        self._link: Link | None = None
        self._transport = ""  # of the link, once the sender has chosen
        self._codec: ChunkCodec | None = None  # with the link
        self._prefix = ""  # of the link's keys in the store, once it is being built

    def perform(self, effect: PostReceive | SendAcknowledged | SendCancel | DropPeer) -> None:
        match effect:
            case PostReceive():
                self._receive(effect)
            case SendAcknowledged() | SendCancel():
                self._send(wire.response_of(effect))
            case DropPeer():
                self.end(effect.reason)
            case _:
                assert_never(effect)

    async def run(self, requests: Requests, context: Context) -> str:
        """Shake hands and exchange until either side ends it; returns why."""
        work: asyncio.Future[None] = asyncio.create_task(self._connect_and_exchange(requests, context))
        either: list[asyncio.Future[Any]] = [work, self._outcome]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            work.cancel()
            (result,) = await asyncio.gather(work, return_exceptions=True)
            self.end(describe_end(result))
        raise_if_bug(result)
        return self._outcome.result()

    def end(self, reason: str) -> None:
        """Give the link up and report the loss. Posted receives of it are forgotten. Idempotent."""
        if self._outcome.done():
            return
        self._outcome.set_result(reason)
        if self._link is not None:
            self._link.close()
        if prefix := self._prefix:
            self._shared.thread.submit(lambda: self._shared.store.forget(prefix))
        get_logger().info("handoff_peer_lost", peer=str(self._peer), reason=reason)
        self._on_ended()
        self._shared.post(PeerLost(self._peer, reason))

    async def _connect_and_exchange(self, requests: Requests, context: Context) -> None:
        async with asyncio.timeout(self._settings.link_timeout_s):
            await self._handshake(requests, context)
        get_logger().info("handoff_peer_ready", peer=str(self._peer), transport=self._transport)
        self._shared.post(PeerReady(self._peer, held_bytes(self._transport)))
        writer = asyncio.create_task(self._write(context))
        try:
            async for request in requests:
                self._shared.post(wire.event_of_request(self._peer, request, self._transport))
        finally:
            writer.cancel()

    async def _handshake(self, requests: Requests, context: Context) -> None:
        is_shared = "shm" in common_kinds("auto", self._settings.transport) and has_shared_memory()
        point = MeetingPoint() if is_shared else None
        try:
            await context.write(pb.ConnectResponse(hello=self._hello(point)))
            opened = (await anext(requests)).open_link
            await context.write(pb.ConnectResponse(link_accepted=self._accept(opened)))
            link = await build_link_off_loop(self._link_plan(point))
        finally:
            if point is not None:
                point.close()
        if self._outcome.done():  # ended in the moment the link stood: no PeerReady after PeerLost
            link.close()
            raise SessionEnded(self._outcome.result())
        aead = Aead(self._settings.aead_kind_on(self._transport), self._key)
        self._link, self._codec = link, ChunkCodec(self._shared.kv_packer, aead)

    def _hello(self, point: MeetingPoint | None) -> pb.ReceiverHello:
        return pb.ReceiverHello(
            worker_id=self._settings.ref.worker_id,
            incarnation=self._settings.ref.incarnation,
            store_host=self._shared.store.host,
            store_port=self._shared.store.port,
            transport=self._settings.transport,
            aead_key=self._key,
            aead_kind=self._settings.aead_kind,
            rank=self._settings.rank.rank,
            world_size=self._settings.rank.world_size,
            shm_name=point.name if point is not None else "",
            shm_token=point.token if point is not None else b"",
        )

    def _accept(self, opened: pb.OpenLink) -> pb.LinkAccepted:
        """What the sender has chosen, which must be something that this worker's setting allows."""
        if not _EPOCH.fullmatch(opened.epoch):
            raise SessionEnded(f"expected open_link with an epoch of 16 hex digits, got {opened.epoch[:32]!r}")
        if opened.transport not in common_kinds(self._settings.transport, self._settings.transport):
            raise SessionEnded(f"transport: {self._settings.transport!r} here, {opened.transport[:32]!r} there")
        self._transport = opened.transport
        self._prefix = link_prefix(self._peer, self._settings.ref, opened.epoch)
        if self._transport != "shm":
            self._shared.store.open(self._prefix)
            # The other end may need the store a little longer than this one, and gives up after the time-out.
            self._loop.call_later(2 * self._settings.link_timeout_s, self._shared.store.shut)
        return pb.LinkAccepted(epoch=opened.epoch)

    def _link_plan(self, point: MeetingPoint | None) -> LinkPlan:
        return LinkPlan(
            transport=self._transport,
            store_host=self._shared.store.host,
            store_port=self._shared.store.port,
            prefix=self._prefix,
            end=RECEIVER_END,
            host=self._settings.host,
            device=self._settings.cache.device,
            timeout_s=self._settings.link_timeout_s,
            secret=self._key,
            sender=self._peer_rank,
            receiver=self._settings.rank,
            meeting=point,
        )

    async def _write(self, context: Context) -> None:
        while True:
            await context.write(await self._outbox.get())

    def _send(self, response: pb.ConnectResponse) -> None:
        try:
            self._outbox.put_nowait(response)
        except asyncio.QueueFull:
            self.end("the peer does not read its control stream")

    def _receive(self, effect: PostReceive) -> None:
        link, codec = self._link, self._codec
        assert link is not None, "PostReceive before PeerReady"
        assert codec is not None
        self._shared.thread.submit(lambda: self._post_receive(link, codec, effect))

    def _post_receive(self, link: Link, codec: ChunkCodec, effect: PostReceive) -> None:
        """In the worker's receiving thread."""
        chunk = effect.chunk
        buffer = self._shared.pool.acquire(chunk.num_bytes)
        codec.prepare(chunk, buffer)
        target = buffer if accepts_shorter(self._transport) else buffer[: chunk.num_bytes]
        link.receive(target, lambda error: self._on_received(codec, effect, buffer, error))

    def _on_received(
        self, codec: ChunkCodec, effect: PostReceive, buffer: torch.Tensor, error: Exception | None
    ) -> None:
        """In the link's thread: check and decrypt what came, before anything can be written."""
        if error is not None:
            self._shared.pool.forget()
            call_in_loop(self._loop, self.end, str(error))
            return
        problem = codec.decrypt(effect.transfer_id, effect.chunk, buffer)
        event = ChunkReceived(self._peer, effect.transfer_id, effect.chunk.seq, problem)
        call_in_loop(self._loop, self._deliver, event, codec, buffer)

    def _deliver(self, event: ChunkReceived, codec: ChunkCodec, buffer: torch.Tensor) -> None:
        if self._outcome.done():
            self._shared.pool.release(buffer)
            return
        self._shared.staged[(event.peer, event.transfer_id, event.seq)] = (buffer, codec)
        self._shared.post(event)
