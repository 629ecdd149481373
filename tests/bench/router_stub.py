"""Workers that compute nothing: the real gRPC servicer, registered in the real Redis, answering at once.

One process holds a prefill and a decode worker. The decode worker emits one TokenBatch for all its attempts per
step, as ours do; the steps are `step_s` apart. Each publishes the blocks of the prompts it is given, and evicts.
Run it as a module with a JSON configuration.
"""

import asyncio
import json
import os
import sys
import time
from itertools import islice

import grpc
import uvloop

from common.cluster.presence import WorkerPresence
from common.cluster.protocol import Registration
from common.values.hashing import block_hashes, hash_root
from common.values.ids import AttemptId, BlockHash, RouterId, WorkerRef
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
    WorkerStats,
)
from common.values.request import Fingerprint, FinishReason, SampledToken, TokenEvent, Work
from common.wire.grpc_options import server_options
from common.wire.pb import worker_pb2_grpc
from common.worker.router_streams import RouterStreams

Message = Reserve | Prefill | Cancel | Drain
STATS_INTERVAL_S = 0.5
LEASE_S = 10.0
BLOCK_SIZE = 16
NUM_BLOCKS = 100_000
NUM_CACHED = 20_000


def token_of(work: Work, position: int) -> TokenEvent:
    """The token at an output position: any text will do, the last one ends the answer."""
    is_last = position + 1 == work.sampling.max_tokens
    token_id = 1000 + 7 * position % 5000
    return TokenEvent(0, position, SampledToken(token_id), FinishReason.LENGTH if is_last else None)


class StubWorker:
    """One worker. Owns its attempts and the step loop."""

    def __init__(self, role: Role, step_s: float) -> None:
        self.role = role
        self._step_s = step_s
        self._positions: dict[AttemptId, tuple[RouterId, Work, int]] = {}
        self._has_work = asyncio.Event()
        ref = WorkerRef(f"{role.value}-0", f"{os.getpid()}")
        fingerprint = Fingerprint((("model", "stub"),))
        self.info = WorkerInfo(
            ref, role, "stub", BLOCK_SIZE, NUM_BLOCKS, 8192, 256, os.getpid(), fingerprint, "127.0.0.1:1"
        )
        self._streams = RouterStreams(self.info, self._on_message, lambda _: None)
        self._cached: dict[BlockHash, None] = {}  # oldest first
        self.presence: WorkerPresence
        self._server = grpc.aio.server(options=server_options())

    async def start(self) -> int:
        """The port it listens on."""
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self._streams, self._server)
        port: int = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return port

    async def register(self, redis_url: str, namespace: str, address: str) -> None:
        registration = Registration(self.info.ref, self.role, address)
        self.presence = WorkerPresence(
            redis_url, namespace, registration, lease_s=LEASE_S, snapshot=lambda: [*self._cached]
        )
        await self.presence.start()

    async def say_stats(self) -> None:
        while True:
            self._streams.broadcast(WorkerStats(kv_blocks_free=NUM_BLOCKS, prefill_tokens_per_s=50_000.0))
            await asyncio.sleep(STATS_INTERVAL_S)

    async def step(self) -> None:
        """Decode for ever. Steps start `step_s` apart however long the machine takes to wake us."""
        while True:
            if not self._positions:
                self._has_work.clear()
                await self._has_work.wait()
            due_s = time.monotonic() + self._step_s
            self._decode()
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))

    def _on_message(self, router_id: RouterId, message: Message) -> None:
        match message:
            case Reserve(work):
                self._store(work)
                self._streams.send(router_id, Granted(work.attempt_id, 0, is_local=False))
                if work.sampling.max_tokens > 1:
                    self._positions[work.attempt_id] = (router_id, work, -1)
                    self._has_work.set()
            case Prefill(work, prefill_try):
                self._store(work)
                first = (token_of(work, 0),)
                self._streams.send(router_id, FirstTokens(work.attempt_id, prefill_try, first, 0.0, 0.0, 0))
            case Cancel(attempt_id):
                self._positions.pop(attempt_id, None)

    def _store(self, work: Work) -> None:
        root = hash_root(dict(self.info.fingerprint.fields), BLOCK_SIZE, work.cache_salt)
        stored = [each for each in block_hashes(work.token_ids, BLOCK_SIZE, root) if each not in self._cached]
        self._cached.update(dict.fromkeys(stored))
        evicted = list(islice(self._cached, max(0, len(self._cached) - NUM_CACHED)))
        for block_hash in evicted:
            del self._cached[block_hash]
        self.presence.publish(stored, evicted)

    def _decode(self) -> None:
        batches: dict[RouterId, list[AttemptTokens]] = {}
        for attempt_id, (router_id, work, position) in list(self._positions.items()):
            if position < 0:  # granted in this step: the prompt is on its way
                self._positions[attempt_id] = (router_id, work, 0)
                continue
            if position == 0:
                self._streams.send(router_id, HandoffReport(attempt_id, 4096, 2, 0.0, 0.0, 0.0, 0, is_local=False))
            token = token_of(work, position)
            batches.setdefault(router_id, []).append(AttemptTokens(attempt_id, (token,)))
            self._positions[attempt_id] = (router_id, work, position + 1)
            if token.finish_reason is not None:
                del self._positions[attempt_id]
        for router_id, attempts in batches.items():
            self._streams.send(router_id, TokenBatch(tuple(attempts)))


async def main(config: dict[str, str]) -> None:
    workers = [StubWorker(role, float(config["step_s"])) for role in (Role.PREFILL, Role.DECODE)]
    addresses = {}
    async with asyncio.TaskGroup() as tasks:
        for worker in workers:
            address = addresses[worker.role.value] = f"127.0.0.1:{await worker.start()}"
            await worker.register(config["redis_url"], config["namespace"], address)
            tasks.create_task(worker.say_stats())
            tasks.create_task(worker.step())
        print(json.dumps(addresses), flush=True)


if __name__ == "__main__":
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    asyncio.run(main(json.loads(sys.argv[1])))
