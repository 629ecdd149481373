"""The worker's side of a router stream over real gRPC on loopback."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from common.engine.kv.block_pool import PoolStats
from common.values.ids import AttemptId, RequestId, RouterId, WorkerRef
from common.values.messages import (
    BlockHolder,
    Cancel,
    Granted,
    Role,
    RouterHello,
    RouterMessage,
    WorkerInfo,
    WorkerMessage,
    WorkerStats,
)
from common.values.request import Fingerprint
from common.wire.convert import (
    MAX_BATCHED,
    router_message_to_pb,
    router_messages_to_pb,
    worker_message_from_pb,
    worker_messages_from_pb,
)
from common.wire.grpc_options import channel_options, server_options
from common.wire.pb import worker_pb2, worker_pb2_grpc
from common.wire.undecodable import RefuseUndecodable
from common.worker import router_streams
from common.worker.audit import AUDIT, Audit
from common.worker.router_streams import RouterStreams

ROUTER = RouterId("router-0")
ATTEMPT = AttemptId(RequestId("r"), 0)
INFO = WorkerInfo(
    WorkerRef("decode-0", "ab"), Role.DECODE, "m", 16, 8, 128, 4, 1, Fingerprint((("dtype", "float32"),)), "h:1"
)


class Recorder:
    """A role that writes down what it hears."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[tuple[RouterId, RouterMessage]] = asyncio.Queue()
        self.lost: asyncio.Queue[RouterId] = asyncio.Queue()
        self.audit: Audit
        self.streams = RouterStreams(
            INFO, lambda *message: self.messages.put_nowait(message), self.lost.put_nowait, lambda: self.audit
        )


class Router:
    """A client end of the stream."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.call = worker_pb2_grpc.WorkerServiceStub(channel).Connect()
        self.num_reads = 0
        self._received: list[WorkerMessage] = []

    async def send(self, message: RouterMessage) -> None:
        await self.call.write(router_message_to_pb(message))

    async def receive(self) -> object:
        while not self._received:
            self.num_reads += 1
            self._received += worker_messages_from_pb(await asyncio.wait_for(self.call.read(), 60))
        return self._received.pop(0)


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Recorder, grpc.aio.Channel]]:
    recorder = Recorder()
    server = grpc.aio.server(interceptors=(RefuseUndecodable(),), options=server_options())
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(recorder.streams, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=channel_options()) as channel:
        yield recorder, channel
    await server.stop(None)


async def connected(channel: grpc.aio.Channel) -> Router:
    router = Router(channel)
    await router.send(RouterHello(ROUTER))
    assert await router.receive() == INFO
    return router


async def test_the_worker_says_first_who_it_is() -> None:
    async with serving() as (_, channel):
        await connected(channel)


async def test_messages_pass_in_both_directions() -> None:
    async with serving() as (recorder, channel):
        router = await connected(channel)
        await router.send(Cancel(ATTEMPT))
        assert await asyncio.wait_for(recorder.messages.get(), 60) == (ROUTER, Cancel(ATTEMPT))
        recorder.streams.send(ROUTER, Granted(ATTEMPT, 3, is_local=False))
        assert await router.receive() == Granted(ATTEMPT, 3, is_local=False)
        recorder.streams.broadcast(WorkerStats(num_running=2))
        assert await router.receive() == WorkerStats(num_running=2)


async def test_a_worker_that_has_closed_its_streams_opens_none() -> None:
    async with serving() as (recorder, channel):
        await connected(channel)
        recorder.streams.close()
        assert await asyncio.wait_for(recorder.lost.get(), 60) == ROUTER
        late = Router(channel)
        await late.send(RouterHello(ROUTER))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await late.call.read()
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_messages_that_wait_together_travel_together_and_in_order() -> None:
    async with serving() as (recorder, channel):
        router = await connected(channel)
        asked = [Cancel(ATTEMPT, (idx,)) for idx in range(MAX_BATCHED)]
        await router.call.write(router_messages_to_pb(asked))
        assert [await asyncio.wait_for(recorder.messages.get(), 60) for _ in asked] == [
            (ROUTER, each) for each in asked
        ]
        answers = [Granted(ATTEMPT, idx, is_local=False) for idx in range(2 * MAX_BATCHED)]
        num_reads = router.num_reads
        for answer in answers:
            recorder.streams.send(ROUTER, answer)
        assert [await router.receive() for _ in answers] == answers
        assert router.num_reads - num_reads <= 3


async def test_what_is_queued_at_the_end_is_still_sent() -> None:
    async with serving() as (recorder, channel):
        router = await connected(channel)
        recorder.streams.send(ROUTER, WorkerStats(num_running=1))
        recorder.streams.send(ROUTER, WorkerStats(num_running=2))
        recorder.streams.close()
        assert [await router.receive() for _ in range(2)] == [WorkerStats(num_running=1), WorkerStats(num_running=2)]
        assert await asyncio.wait_for(router.call.read(), 60) is grpc.aio.EOF


async def test_a_router_that_leaves_is_reported_lost_once() -> None:
    async with serving() as (recorder, channel):
        router = await connected(channel)
        router.call.cancel()
        assert await asyncio.wait_for(recorder.lost.get(), 60) == ROUTER
        recorder.streams.send(ROUTER, WorkerStats())
        assert recorder.lost.empty()


async def test_a_stream_without_hello_is_refused() -> None:
    async with serving() as (_, channel):
        router = Router(channel)
        await router.send(Cancel(ATTEMPT))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await router.receive()
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_second_stream_of_one_router_replaces_the_first() -> None:
    """The old stream's requests are cancelled; the new stream is untouched by the old one's end."""
    async with serving() as (recorder, channel):
        await connected(channel)
        second = await connected(channel)
        assert await asyncio.wait_for(recorder.lost.get(), 60) == ROUTER
        recorder.streams.send(ROUTER, WorkerStats(num_waiting=9))
        assert await second.receive() == WorkerStats(num_waiting=9)
        assert recorder.lost.empty()


async def test_a_router_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_streams, "MAX_QUEUED_MESSAGES", 3)
    async with serving() as (recorder, channel):
        await connected(channel)
        for _ in range(5):
            recorder.streams.send(ROUTER, WorkerStats())
        assert await asyncio.wait_for(recorder.lost.get(), 60) == ROUTER


async def test_a_worker_says_who_holds_its_blocks() -> None:
    async with serving() as (recorder, channel):
        found = Audit(INFO.ref, INFO.role, PoolStats(8, 1, 2, 3, 2), (BlockHolder(ATTEMPT, "ready", 1, 2.0, 3.0),), ())
        recorder.audit = found
        answer = await worker_pb2_grpc.WorkerServiceStub(channel).Audit(worker_pb2.AuditRequest(), timeout=60)
        assert AUDIT.decode(answer) == found


class Spoken:
    """What a router says on one stream: an iterator that never ends, without gRPC's own buffers."""

    def __init__(self, *messages: RouterMessage) -> None:
        self._messages: asyncio.Queue[RouterMessage] = asyncio.Queue()
        for message in messages:
            self.say(message)

    def say(self, message: RouterMessage) -> None:
        self._messages.put_nowait(message)

    def __aiter__(self) -> "Spoken":
        return self

    async def __anext__(self) -> worker_pb2.ConnectRequest:
        return router_message_to_pb(await self._messages.get())


async def test_what_was_buffered_in_a_replaced_stream_is_not_heard() -> None:
    """Else a Reserve of the old lease would be granted under the new one, and nobody would ever use it.

    1. A router connects. 2. It says something that lies in the buffer when 3. it connects again.
    """
    recorder = Recorder()
    first, second = Spoken(RouterHello(ROUTER)), Spoken(RouterHello(ROUTER))
    old = recorder.streams.Connect(first, None)
    assert worker_message_from_pb(await anext(old)) == INFO
    await asyncio.sleep(0)  # the reader waits for the next message now
    first.say(Cancel(ATTEMPT))
    new = recorder.streams.Connect(second, None)
    await anext(new)
    assert [response async for response in old] == []
    assert recorder.messages.empty()
    second.say(Cancel(ATTEMPT))
    assert await asyncio.wait_for(recorder.messages.get(), 60) == (ROUTER, Cancel(ATTEMPT))
    await new.aclose()


async def test_what_cannot_be_decoded_is_refused_without_pythons_words() -> None:
    """As the only message of Audit, the first of a stream, or after others; the stream's router is lost."""
    service = "/pdserve.worker.v1.WorkerService"
    async with serving() as (recorder, channel):
        audit = channel.unary_unary(f"{service}/Audit")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await audit(b"\xff\xff")
        errors = [refused.value]
        hello = router_message_to_pb(RouterHello(ROUTER)).SerializeToString()
        for messages in ([b"\xff\xff"], [hello, b"\x0a\xff"]):
            call = channel.stream_stream(f"{service}/Connect")()
            for message in messages:
                await call.write(message)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                while await asyncio.wait_for(call.read(), 60) is not grpc.aio.EOF:
                    pass
            errors.append(refused.value)
        assert [(error.code(), error.details()) for error in errors] == [
            (grpc.StatusCode.INVALID_ARGUMENT, "the message cannot be decoded")
        ] * 3
        await connected(channel)
        assert await asyncio.wait_for(recorder.lost.get(), 60) == ROUTER
