"""One stream to one worker: hello, messages both ways, reconnecting while the worker is registered.

Decides nothing: what arrives is posted as events, what the core sends goes through a bounded queue. A worker that
does not read its messages is cut off; its requests then go elsewhere.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeAlias

import grpc

from common.cluster.protocol import Registration
from common.telemetry.logs import get_logger
from common.tls.identity import Identity
from common.values.errors import PeerError
from common.values.ids import RouterId
from common.values.messages import RouterHello, RouterMessage, WorkerInfo
from common.wire.convert import (
    router_message_to_pb,
    router_messages_to_pb,
    take_batch,
    worker_message_from_pb,
    worker_messages_from_pb,
)
from common.wire.grpc_options import channel_options
from common.wire.pb import worker_pb2_grpc
from router.core.events import RouterEvent, WorkerConnected, WorkerLost, WorkerMessageReceived

HELLO_TIMEOUT_S = 5.0
FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0
MAX_QUEUED_MESSAGES = 4096

Call: TypeAlias = grpc.aio.StreamStreamCall
_STREAM_ERRORS = (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError, PeerError, TimeoutError)


class WorkerClient:
    """Owns the channel, the call and the outgoing queue. `send`, `drop` and `retire` from the event loop's thread."""

    def __init__(
        self,
        registration: Registration,
        router_id: RouterId,
        post: Callable[[RouterEvent], None],
        identity: Identity,
    ) -> None:
        self.registration = registration
        self._identity = identity
        self._router_id = router_id
        self._post = post
        self._queue: asyncio.Queue[RouterMessage] = asyncio.Queue(MAX_QUEUED_MESSAGES)
        self._dropped = asyncio.Event()
        self._is_connected = False
        self._has_left = False
        self._retired = asyncio.Event()

    @property
    def is_connected(self) -> bool:
        """True between the worker's hello and the end of the stream."""
        return self._is_connected

    @property
    def has_left(self) -> bool:
        """True when the worker itself ended the last stream in order: it closes them when its life ends."""
        return self._has_left

    def send(self, message: RouterMessage) -> None:
        """Queue a message; without a stream it is dropped, as the worker has forgotten everything it was asked."""
        if not self._is_connected:
            return
        try:
            self._queue.put_nowait(message)
        except asyncio.QueueFull:
            self.drop("does not read its messages")

    def drop(self, reason: str) -> None:
        """End the stream; `run` connects again."""
        get_logger().warning("worker_dropped", worker=str(self.registration.ref), reason=reason)
        self._dropped.set()

    def retire(self) -> None:
        """Do not connect again. A stream that is up stays until it ends."""
        self._retired.set()

    async def run(self) -> None:
        """Hold a stream to the worker until retired and the stream has ended."""
        backoff_s = FIRST_BACKOFF_S
        while not self._retired.is_set():
            reason, was_connected = await self._connect_once()
            backoff_s = FIRST_BACKOFF_S if was_connected else min(MAX_BACKOFF_S, 2 * backoff_s)
            get_logger().info("worker_stream_ended", worker=str(self.registration.ref), reason=reason)
            try:
                async with asyncio.timeout(backoff_s):
                    await self._retired.wait()
            except TimeoutError:
                pass

    async def _connect_once(self) -> tuple[str, bool]:
        """One stream from connect to end; returns why it ended, and whether it ever was up."""
        was_connected, reason = False, "stream ended"
        self._dropped.clear()
        self._has_left = False
        try:
            async with self._open() as call:
                info = await self._hello(call)
                was_connected = self._is_connected = True
                self._post(WorkerConnected(info, self.registration.address))
                await self._exchange(call)
                self._has_left = not self._dropped.is_set()
        except _STREAM_ERRORS as error:
            reason = _reason(error)
        finally:
            self._is_connected = False
            self._queue = asyncio.Queue(MAX_QUEUED_MESSAGES)
            if was_connected:
                self._post(WorkerLost(self.registration.ref, reason))
        return reason, was_connected

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[Call]:
        # A subchannel of its own: a shared one would wait out the back-off of the worker's earlier life.
        options = [*channel_options(), ("grpc.use_local_subchannel_pool", 1)]
        role = self.registration.role.value
        async with self._identity.channel(self.registration.address, role, options) as channel:
            call: Call = worker_pb2_grpc.WorkerServiceStub(channel).Connect()  # type: ignore[no-untyped-call]
            try:
                yield call
            finally:
                call.cancel()

    async def _hello(self, call: Call) -> WorkerInfo:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            await call.write(router_message_to_pb(RouterHello(self._router_id)))
            response = await call.read()
        if response is grpc.aio.EOF:
            raise PeerError("stream ended before the worker said who it is")
        info = worker_message_from_pb(response)
        if not isinstance(info, WorkerInfo):
            raise PeerError(f"expected WorkerInfo first, got {type(info).__name__}")
        expected = self.registration.ref, self.registration.role
        if (info.ref, info.role) != expected:
            raise PeerError(f"expected {expected} at {self.registration.address}, found {info.ref} {info.role}")
        return info

    async def _exchange(self, call: Call) -> None:
        """Read and write until either ends, or the stream is dropped. Raises what ended it."""
        parts = [asyncio.ensure_future(part) for part in (self._read(call), self._write(call), self._dropped.wait())]
        try:
            ended, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            for part in ended:
                part.result()
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)

    async def _read(self, call: Call) -> None:
        while (response := await call.read()) is not grpc.aio.EOF:
            for message in worker_messages_from_pb(response):
                self._post(WorkerMessageReceived(self.registration.ref, message))

    async def _write(self, call: Call) -> None:
        while True:
            await call.write(router_messages_to_pb(await take_batch(self._queue)))


def _reason(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
