"""The worker's side of `WorkerService`: one stream per router, messages in, messages out.

Owns the outgoing queue of each router. An open stream is the router's lease on its requests: when it ends, for
whatever reason, the role hears `router_lost` and cancels them.
"""

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc

from common.telemetry.logs import get_logger
from common.values.errors import PeerError
from common.values.ids import RouterId
from common.values.messages import Cancel, Drain, Prefill, Reserve, RouterHello, WorkerInfo, WorkerMessage
from common.wire.convert import (
    router_message_from_pb,
    router_messages_from_pb,
    take_batch,
    worker_messages_to_pb,
)
from common.wire.pb import worker_pb2, worker_pb2_grpc
from common.worker.audit import AUDIT, Audit

OnMessage = Callable[[RouterId, Reserve | Prefill | Cancel | Drain], None]
OnRouterLost = Callable[[RouterId], None]
# A router that does not read this many messages is gone or wedged: it is cut off and its requests are cancelled.
MAX_QUEUED_MESSAGES = 10_000
HELLO_TIMEOUT_S = 5.0


class RouterStreams(worker_pb2_grpc.WorkerServiceServicer):
    """gRPC servicer. `send` and `broadcast` only from the event loop's thread."""

    def __init__(
        self,
        info: WorkerInfo,
        on_message: OnMessage,
        on_router_lost: OnRouterLost,
        audit: Callable[[], Audit] | None = None,
    ) -> None:
        self._info = info
        self._audit = audit
        self._on_message = on_message
        self._on_router_lost = on_router_lost
        self._queues: dict[RouterId, asyncio.Queue[WorkerMessage | None]] = {}
        self._is_closed = False

    def send(self, router_id: RouterId, message: WorkerMessage) -> None:
        """Queue a message. A router that left hears nothing: its requests are being cancelled."""
        queue = self._queues.get(router_id)
        if queue is None:
            return
        if queue.qsize() >= MAX_QUEUED_MESSAGES:
            get_logger().warning("router_too_slow", router_id=router_id, queued=queue.qsize())
            self._end(router_id, queue)
            return
        queue.put_nowait(message)

    def broadcast(self, message: WorkerMessage) -> None:
        for router_id in list(self._queues):
            self.send(router_id, message)

    def close(self) -> None:
        """End every stream after what is queued, and open none: the role behind them is being taken down."""
        self._is_closed = True
        for queue in self._queues.values():
            queue.put_nowait(None)

    async def Connect(
        self, request_iterator: AsyncIterator[worker_pb2.ConnectRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.ConnectResponse]:
        """One router's stream, until either side ends it."""
        router_id = await self._hello(request_iterator, context)
        if self._is_closed:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "this life of the worker is ending")
        if (old := self._queues.get(router_id)) is not None:
            self._end(router_id, old)
        queue: asyncio.Queue[WorkerMessage | None] = asyncio.Queue()
        self._queues[router_id] = queue
        reader = asyncio.create_task(self._read(router_id, request_iterator, queue))
        get_logger().info("router_connected", router_id=router_id)
        try:
            yield worker_messages_to_pb([self._info])
            is_open = True
            while is_open:
                queued = await take_batch(queue)
                is_open = None not in queued
                messages = [message for message in queued if message is not None]
                if messages:
                    yield worker_messages_to_pb(messages)
        finally:
            reader.cancel()
            self._end(router_id, queue)

    async def Audit(
        self, request: worker_pb2.AuditRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.AuditResponse:
        """Who holds what here, in one moment between two events."""
        if self._audit is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this worker has no ledger to audit")
            raise AssertionError("abort always raises")
        return AUDIT.encode(self._audit())

    async def _hello(
        self, requests: AsyncIterator[worker_pb2.ConnectRequest], context: grpc.aio.ServicerContext
    ) -> RouterId:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                message = router_message_from_pb(await anext(requests))
        except (TimeoutError, StopAsyncIteration, PeerError):
            message = None
        if isinstance(message, RouterHello):
            return message.router_id
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "expected RouterHello first")
        raise AssertionError("abort always raises")

    async def _read(
        self,
        router_id: RouterId,
        requests: AsyncIterator[worker_pb2.ConnectRequest],
        queue: asyncio.Queue[WorkerMessage | None],
    ) -> None:
        try:
            async for request in requests:
                messages = router_messages_from_pb(request)
                if self._queues.get(router_id) is not queue:
                    return  # what was buffered when the router connected again belongs to a lease that has ended
                for message in messages:
                    if isinstance(message, Reserve | Prefill | Cancel | Drain):
                        self._on_message(router_id, message)
        except PeerError as error:
            get_logger().warning("router_message_invalid", router_id=router_id, reason=str(error))
        finally:
            queue.put_nowait(None)

    def _end(self, router_id: RouterId, queue: asyncio.Queue[WorkerMessage | None]) -> None:
        if self._queues.get(router_id) is not queue:
            return
        del self._queues[router_id]
        queue.put_nowait(None)
        get_logger().info("router_disconnected", router_id=router_id)
        self._on_router_lost(router_id)
