"""The prefill worker's session with one decode worker: its control stream, link and pack thread.

From ConnectPeer to PeerLost. PeerLost is posted last: after the pack thread has ended, so every emitted SendChunk
has been packed or never will be, and no event of the peer follows.
"""

import asyncio
import secrets
from collections.abc import Callable
from typing import Any

import grpc

from common.telemetry.logs import get_logger
from common.tls.identity import Component
from common.values.ids import WorkerRef
from common.values.ranks import Rank
from common.wire.pb import handoff_pb2 as pb
from common.wire.pb import handoff_pb2_grpc
from kvtransfer import wire
from kvtransfer.chunk.aead import Aead
from kvtransfer.chunk.codec import ChunkCodec
from kvtransfer.chunk.pack import KVPacker
from kvtransfer.events import ConnectPeer, PeerReady, SendCancel, SendChunk, SenderEvent, SendFinished
from kvtransfer.links.build import LinkPlan, common_kinds
from kvtransfer.links.gloo import SENDER_END
from kvtransfer.links.meeting import Meeting, meet
from kvtransfer.links.protocol import Link, LinkClosed
from kvtransfer.sender.packer import Packer
from kvtransfer.session import (
    MAX_QUEUED_MESSAGES,
    SessionEnded,
    SessionSettings,
    ThreadsafePost,
    build_link_off_loop,
    call_in_loop,
    describe_end,
    link_prefix,
    raise_if_bug,
)

Post = Callable[[SenderEvent], None]
MEETING_TIMEOUT_S = 2.0
# grpc.aio has no type stubs.
Call = Any
_stub_of: Any = handoff_pb2_grpc.HandoffServiceStub


class SenderSession:
    """One peer's session. `_outcome` is what ends it: the first reason wins."""

    def __init__(
        self,
        settings: SessionSettings,
        packer: KVPacker,
        target: ConnectPeer,
        post: Post,
        on_ended: Callable[[WorkerRef, str], None],
    ) -> None:
        self._settings = settings
        self._kv_packer = packer
        self._target = target
        self._post = ThreadsafePost(post)
        self._post_here = post
        self._on_ended = on_ended
        self._loop = asyncio.get_running_loop()
        self._pool = settings.new_staging_pool()
        self._outbox: asyncio.Queue[pb.ConnectRequest] = asyncio.Queue(MAX_QUEUED_MESSAGES)
        self._outcome: asyncio.Future[str] = self._loop.create_future()
        self._link: Link | None = None
        self._transport = ""  # of the link
        self._packer: Packer | None = None
        self._task = asyncio.create_task(self._run(), name=f"handoff to {target.peer}")

    def send(self, effect: SendChunk | SendFinished | SendCancel) -> None:
        """Announce in the order of the calls; payloads follow in the same order."""
        if self._outcome.done():
            return
        try:
            self._outbox.put_nowait(self._request_of(effect))
        except asyncio.QueueFull:
            self.end("the peer does not read its control stream")
            return
        if isinstance(effect, SendChunk):
            assert self._packer is not None, "SendChunk before PeerReady"
            self._packer.submit(effect)

    def _request_of(self, effect: SendChunk | SendFinished | SendCancel) -> pb.ConnectRequest:
        request = wire.request_of(effect)
        if isinstance(effect, SendFinished) and self._packer is not None:
            request.finished.link_bytes_per_s = self._packer.meter.bytes_per_s
        return request

    def end(self, reason: str) -> None:
        if not self._outcome.done():
            self._outcome.set_result(reason)

    async def ended(self) -> None:
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        work: asyncio.Future[None] = asyncio.create_task(self._connect_and_exchange())
        either: list[asyncio.Future[Any]] = [work, self._outcome]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            work.cancel()
            (result,) = await asyncio.gather(work, return_exceptions=True)
            self.end(describe_end(result))
            await self._tear_down()
            self._post.close()
            self._on_ended(self._target.peer, self._outcome.result())
        raise_if_bug(result)

    async def _connect_and_exchange(self) -> None:
        async with self._settings.identity.channel(self._target.address, Component.DECODE) as channel:
            call = _stub_of(channel).Connect()
            try:
                async with asyncio.timeout(self._settings.link_timeout_s):
                    codec = await self._handshake(call)
                if self._outcome.done():  # dropped in the moment the link stood: no PeerReady after that
                    raise SessionEnded(self._outcome.result())
                self._start(codec)
                await self._exchange(call)
            finally:
                call.cancel()

    async def _handshake(self, call: Call) -> ChunkCodec:
        """Hello both ways, check who answers, build the link."""
        await call.write(wire.sender_hello(self._settings.ref, self._settings.fingerprint, self._settings.rank))
        hello = (await _read(call, "hello")).hello
        got = WorkerRef(hello.worker_id, hello.incarnation)
        if got != self._target.peer:
            raise SessionEnded(f"expected {self._target.peer}, {got} answers: stale incarnation")
        kind = self._settings.aead_kind
        if hello.aead_kind != kind:
            raise SessionEnded(f"encryption: {str(kind)!r} here, {hello.aead_kind[:32]!r} there (setting `digest`)")
        self._transport, meeting = await self._choose_transport(hello)
        epoch = secrets.token_hex(8)
        await call.write(pb.ConnectRequest(open_link=pb.OpenLink(epoch=epoch, transport=self._transport)))
        accepted = (await _read(call, "link_accepted")).link_accepted
        if accepted.epoch != epoch:
            raise SessionEnded(f"expected epoch {epoch}, accepted {accepted.epoch}")
        self._link = await build_link_off_loop(self._link_plan(hello, epoch, meeting))
        return ChunkCodec(self._kv_packer, Aead(self._settings.aead_kind_on(self._transport), hello.aead_key))

    async def _choose_transport(self, hello: pb.ReceiverHello) -> tuple[str, Meeting | None]:
        """The first that both settings allow and that can be; a worse one than wanted is never taken in silence."""
        here, there = self._settings.transport, hello.transport
        kinds = common_kinds(here, there)
        if not kinds:
            raise SessionEnded(f"transport: {here!r} here, {there[:32]!r} there")
        if kinds[0] != "shm":
            return kinds[0], None
        try:
            return "shm", await asyncio.to_thread(meet, hello.shm_name, hello.shm_token, MEETING_TIMEOUT_S)
        except LinkClosed as error:
            if len(kinds) == 1:
                raise SessionEnded(f"transport shm: {error}") from error
            get_logger().info("handoff_without_shm", peer=str(self._target.peer), transport=kinds[1], reason=str(error))
            return kinds[1], None

    def _link_plan(self, hello: pb.ReceiverHello, epoch: str, meeting: Meeting | None) -> LinkPlan:
        settings = self._settings
        return LinkPlan(
            transport=self._transport,
            store_host=hello.store_host,
            store_port=hello.store_port,
            prefix=link_prefix(settings.ref, self._target.peer, epoch),
            end=SENDER_END,
            host=settings.host,
            device=settings.cache.device,
            timeout_s=settings.link_timeout_s,
            secret=hello.aead_key,
            sender=settings.rank,
            receiver=Rank(hello.rank, hello.world_size),
            meeting=meeting,
        )

    def _start(self, codec: ChunkCodec) -> None:
        assert self._link is not None

        def on_failure(reason: str) -> None:
            call_in_loop(self._loop, self.end, reason)

        self._packer = Packer(codec, self._pool, self._link, self._post, on_failure)
        get_logger().info("handoff_peer_ready", peer=str(self._target.peer), transport=self._transport)
        self._post_here(PeerReady(self._target.peer))

    async def _exchange(self, call: Call) -> None:
        writer = asyncio.create_task(self._write(call))
        try:
            while True:
                self._post_here(wire.event_of_response(await _read(call)))
        finally:
            writer.cancel()

    async def _write(self, call: Call) -> None:
        """Ends with the stream, whose end the reader reports."""
        try:
            while True:
                await call.write(await self._outbox.get())
        except (grpc.RpcError, asyncio.InvalidStateError):
            self.end("the control stream broke")

    async def _tear_down(self) -> None:
        """Stop reading blocks, then give the link up."""
        if self._packer is not None:
            stopped: asyncio.Future[None] = self._loop.create_future()
            self._packer.close(lambda: call_in_loop(self._loop, stopped.set_result, None))
            await stopped
        if self._link is not None:
            self._link.close()


async def _read(call: Call, expected: str | None = None) -> pb.ConnectResponse:
    response = await call.read()
    if response is grpc.aio.EOF:
        raise SessionEnded("the peer closed the control stream")
    assert isinstance(response, pb.ConnectResponse)
    if expected is not None and not response.HasField(expected):  # type: ignore[arg-type]
        raise SessionEnded(f"expected {expected}, got {response.WhichOneof('message')}")
    return response
