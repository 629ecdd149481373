"""A worker process as far as the network can tell: the real gRPC servicer of our workers over a scripted role."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc

from common.cluster.memory import InMemoryIndex
from common.cluster.protocol import Registration
from common.values.ids import RouterId
from common.values.messages import (
    AttemptTokens,
    Cancel,
    Drain,
    FirstTokens,
    Granted,
    HandoffReport,
    Prefill,
    Reserve,
    Role,
    TokenBatch,
    WorkerInfo,
    WorkerMessage,
    WorkerStats,
)
from common.wire.grpc_options import server_options
from common.wire.pb import worker_pb2_grpc
from common.worker.router_streams import RouterStreams
from tests.router.core.kit import worker_info
from tests.router.fake_workers import sample

Message = Reserve | Prefill | Cancel | Drain


class GrpcWorker:
    """Answers at once: a prefill worker with first tokens, a decode worker with everything after them.

    `received` keeps what routers asked for; `is_paused` lets requests pile up unanswered.
    """

    def __init__(self, worker_id: str, index: InMemoryIndex, incarnation: str = "1") -> None:
        self.info: WorkerInfo = worker_info(worker_id, incarnation)
        self.received: list[Message] = []
        self.num_routers_lost = 0
        self.is_paused = False
        self.changed = asyncio.Event()
        self.index = index
        self._streams = RouterStreams(self.info, self._on_message, self._on_router_lost)
        self._server = grpc.aio.server(options=server_options())

    async def start(self) -> None:
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self._streams, self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        self.index.register(Registration(self.info.ref, self.info.role, f"127.0.0.1:{port}"))

    async def kill(self) -> None:
        """As a process dies: the connection breaks, the lease goes."""
        self.index.deregister(self.info.ref)
        await self._server.stop(None)

    def forget_lease(self) -> None:
        self.index.deregister(self.info.ref)

    def send(self, message: WorkerMessage) -> None:
        self._streams.broadcast(message)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something about this worker to become true."""
        async with asyncio.timeout(60):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    def _on_router_lost(self, router_id: RouterId) -> None:
        self.num_routers_lost += 1
        self.changed.set()

    def _on_message(self, router_id: RouterId, message: Message) -> None:
        self.received.append(message)
        self.changed.set()
        if not self.is_paused:
            self.answer(message)

    def answer(self, message: Message) -> None:
        if isinstance(message, Prefill):
            work = message.work
            events = tuple(sample(work, work.token_ids, choice) for choice in work.choices)
            self.send(FirstTokens(work.attempt_id, message.prefill_try, events, 0.001, 0.002, 16))
        elif isinstance(message, Reserve) and self.info.role is Role.DECODE:
            self.send(Granted(message.work.attempt_id, 0, is_local=False))
            self._generate(message)

    def _generate(self, message: Reserve) -> None:
        """All tokens of all choices, one message per step, as if the KV had come."""
        work = message.work
        self.send(HandoffReport(work.attempt_id, 4096, 2, 0.01, 0.005, 0.001, 0, is_local=False))
        sequences = dict.fromkeys(work.choices, work.token_ids)
        while sequences:
            events = tuple(sample(work, token_ids, choice) for choice, token_ids in sequences.items())
            self.send(TokenBatch((AttemptTokens(work.attempt_id, events),)))
            sequences = {
                event.choice_idx: (*sequences[event.choice_idx], event.token.token_id)
                for event in events
                if event.finish_reason is None
            }


def idle_stats(worker: GrpcWorker, **fields: object) -> WorkerStats:
    return replace(WorkerStats(kv_blocks_free=worker.info.num_blocks), **fields)  # type: ignore[arg-type]


@asynccontextmanager
async def grpc_workers(index: InMemoryIndex, *worker_ids: str) -> AsyncIterator[dict[str, GrpcWorker]]:
    """Running workers by id; all are stopped at the end."""
    workers = {worker_id: GrpcWorker(worker_id, index) for worker_id in worker_ids}
    for worker in workers.values():
        await worker.start()
    try:
        yield workers
    finally:
        for worker in workers.values():
            await worker.kill()
