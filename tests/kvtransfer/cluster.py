"""A prefill and a decode worker's handoff on loopback: real cores, sessions, gRPC and gloo; no model."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import torch

from common.cores.core_loop import CoreLoop
from common.engine.kv.cache import KVCache
from common.values.ids import AttemptId, RequestId, TransferId, WorkerRef
from common.values.request import Fingerprint, SampledToken
from common.wire.grpc_options import server_options
from kvtransfer.chunk.plan import ChunkPlanner
from kvtransfer.events import (
    AttemptReleased,
    ChunkSent,
    FirstToken,
    FirstTokensSampled,
    PeerLost,
    ReceiverEffect,
    ReceiverEvent,
    SenderEffect,
    SenderEvent,
    TokensComputed,
    TransferEnded,
    TransferExpected,
    TransferFailedLocally,
    TransferOutcome,
    TransferReceived,
    TransferStarted,
)
from kvtransfer.receiver.core import ReceiverCore
from kvtransfer.receiver.sessions import ReceiverSessions
from kvtransfer.sender.core import SenderCore
from kvtransfer.sender.sessions import SenderSessions
from kvtransfer.session import SessionSettings
from tests.caches import attention_spec, fill

NUM_TOKENS = 100
SOURCE_TABLE, TARGET_TABLE = (5, 3, 9, 1, 7, 11, 2), (4, 0, 6, 3)
PREFILL, DECODE = WorkerRef("prefill-0", "aa"), WorkerRef("decode-0", "bb")
FIRST = (FirstToken(0, SampledToken(7, -0.5, ((7, -0.5), (9, -1.5)))),)
NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 16
FINGERPRINT = Fingerprint((("dtype", "float32"), ("layers", "4")))
TEST_TIMEOUT_S = 60.0


def new_cache(
    block_size: int,
    num_tokens: int = 1024,
    num_layers: int = NUM_LAYERS,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> KVCache:
    """All zeros."""
    spec = attention_spec(num_layers, NUM_KV_HEADS, HEAD_DIM, dtype, block_size)
    cache = KVCache(spec, (num_tokens // block_size,), device)
    fill(cache, 0.0)
    return cache


def new_transfer_id(name: str, prefill_try: int = 0) -> TransferId:
    return TransferId(AttemptId(RequestId(name), 0), prefill_try)


def request_rows(seed: int, num_tokens: int, num_layers: int = NUM_LAYERS) -> torch.Tensor:
    """[num_layers, 2, num_tokens, num_kv_heads, head_dim]: the KV of a request, unlike any other's."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_layers, 2, num_tokens, NUM_KV_HEADS, HEAD_DIM, generator=generator)


def rows_of(kv: KVCache, block_table: tuple[int, ...], num_tokens: int) -> torch.Tensor:
    """What a cache holds for a request, [num_layers, planes, num_tokens, *row]; the plain way."""
    return torch.stack([plane[:, list(block_table)].flatten(1, 2)[:, :num_tokens] for plane in kv.planes[0]], 1)


def put_rows(kv: KVCache, block_table: tuple[int, ...], layer: int, token_start: int, rows: torch.Tensor) -> None:
    """Write one layer's rows [planes, num_tokens, ...] token by token; the plain way."""
    for offset in range(rows.shape[1]):
        block_idx, place = divmod(token_start + offset, kv.block_size)
        for plane, values in zip(kv.planes[0], rows, strict=True):
            plane[layer, block_table[block_idx], place] = values[offset]


@dataclass
class Changed:
    """Lets tests wait until something is so, without polling."""

    condition: asyncio.Condition = field(default_factory=asyncio.Condition)

    def notify(self) -> None:
        asyncio.get_running_loop().create_task(self._notify())

    async def _notify(self) -> None:
        async with self.condition:
            self.condition.notify_all()

    async def wait_for(self, predicate: Callable[[], bool]) -> None:
        async with asyncio.timeout(TEST_TIMEOUT_S), self.condition:
            await self.condition.wait_for(predicate)


class Prefill:
    """The sender's half. `ended` collects how transfers ended."""

    def __init__(self, settings: SessionSettings, planner: ChunkPlanner, changed: Changed) -> None:
        self.kv = settings.cache
        self.core = SenderCore(planner, settings.max_inflight_bytes, settings.link_timeout_s)
        self.loop: CoreLoop[SenderEvent, SenderEffect] = CoreLoop(self.core, self._perform)
        self.sessions = SenderSessions(settings, self._post)
        self.ended: dict[TransferId, TransferEnded] = {}
        self.lost: list[PeerLost] = []
        self.events: list[SenderEvent] = []
        self._changed = changed

    def _post(self, event: SenderEvent) -> None:
        self.events.append(event)
        if isinstance(event, PeerLost):
            self.lost.append(event)
        self.loop.post(event)
        self.core.check_invariants()
        self._changed.notify()

    def _perform(self, effect: SenderEffect) -> None:
        if isinstance(effect, TransferEnded):
            self.ended[effect.transfer_id] = effect
            self._changed.notify()
        else:
            self.sessions.perform(effect)

    def start(
        self,
        transfer_id: TransferId,
        address: str,
        block_table: tuple[int, ...],
        num_tokens: int,
        first_token: int = 0,
        deadline_s: float = 1e12,
        peer: WorkerRef = DECODE,
    ) -> None:
        started = TransferStarted(transfer_id, peer, address, first_token, num_tokens, (block_table,), deadline_s)
        self.loop.post(started)

    def report(self, transfer_id: TransferId, block_table: tuple[int, ...], rows: torch.Tensor, token_end: int) -> None:
        """Write every layer of the tokens below `token_end` at once and report it."""
        for layer in range(rows.shape[0]):
            put_rows(self.kv, block_table, layer, 0, rows[layer, :, :token_end])
        self.loop.post(TokensComputed(transfer_id, rows.shape[0], token_end))

    def num_sent(self, transfer_id: TransferId) -> int:
        """Chunks that the peer took."""
        return sum(isinstance(event, ChunkSent) and event.transfer_id == transfer_id for event in self.events)

    async def compute(
        self, transfer_id: TransferId, block_table: tuple[int, ...], rows: torch.Tensor, step: int, first_token: int = 0
    ) -> None:
        """Write the request's KV layer by layer in steps of `step` tokens, reporting each layer, then sample.

        Stops when the transfer has ended meanwhile, as a prefill core does.
        """
        num_tokens = rows.shape[2]
        for start in range(first_token, num_tokens, step):
            end = min(start + step, num_tokens)
            for layer in range(rows.shape[0]):
                put_rows(self.kv, block_table, layer, start, rows[layer, :, start:end])
                if transfer_id in self.ended:
                    return
                self.loop.post(TokensComputed(transfer_id, layer + 1, end))
                await asyncio.sleep(0)
        if transfer_id not in self.ended:
            self.loop.post(FirstTokensSampled(transfer_id, FIRST))


class Decode:
    """The receiver's half."""

    def __init__(self, settings: SessionSettings, planner: ChunkPlanner, changed: Changed) -> None:
        self.kv = settings.cache
        self.core = ReceiverCore(planner, settings.max_inflight_bytes, settings.link_timeout_s)
        self.loop: CoreLoop[ReceiverEvent, ReceiverEffect] = CoreLoop(self.core, self._perform)
        self.sessions = ReceiverSessions(settings, self._post)
        self.received: dict[TransferId, TransferReceived] = {}
        self.failed: dict[TransferId, TransferFailedLocally] = {}
        self.released: set[AttemptId] = set()
        self.lost: list[PeerLost] = []
        self.events: list[ReceiverEvent] = []
        self._changed = changed

    def _post(self, event: ReceiverEvent) -> None:
        self.events.append(event)
        if isinstance(event, PeerLost):
            self.lost.append(event)
        self.loop.post(event)
        self.core.check_invariants()
        self._changed.notify()

    def _perform(self, effect: ReceiverEffect) -> None:
        match effect:
            case TransferReceived():
                self.received[effect.transfer_id] = effect
            case TransferFailedLocally():
                self.failed[effect.transfer_id] = effect
            case AttemptReleased():
                self.released.add(effect.attempt_id)
            case _:
                self.sessions.perform(effect)
                return
        self._changed.notify()

    def expect(
        self, transfer_id: TransferId, block_table: tuple[int, ...], num_tokens: int, first_token: int = 0
    ) -> None:
        self.loop.post(TransferExpected(transfer_id.attempt_id, first_token, num_tokens, (block_table,), len(FIRST)))


@dataclass
class Pair:
    prefill: Prefill
    decode: Decode
    address: str
    changed: Changed

    async def wait_for(self, predicate: Callable[[], bool]) -> None:
        await self.changed.wait_for(predicate)

    async def until_ended(self, transfer_id: TransferId) -> TransferOutcome:
        await self.wait_for(lambda: transfer_id in self.prefill.ended)
        return self.prefill.ended[transfer_id].outcome


@asynccontextmanager
async def pair(
    *,
    prefill_block_size: int = 16,
    decode_block_size: int = 32,
    min_chunk_bytes: int = 2048,
    max_inflight_bytes: int = 32 << 10,
    link_timeout_s: float = 10.0,
    prefill_pairing: Fingerprint = FINGERPRINT,
    digest: bool = True,
    prefill_digest: bool | None = None,
    caches: tuple[KVCache, KVCache] | None = None,
    transports: tuple[str, str] = ("gloo", "gloo"),
) -> AsyncIterator[Pair]:
    """Both workers; at the end everything is closed and nothing may be left staged. `transports`: prefill, decode."""
    changed = Changed()
    source, target = caches or (new_cache(prefill_block_size), new_cache(decode_block_size))
    planner = ChunkPlanner(source.spec, min_chunk_bytes)

    def settings(
        ref: WorkerRef, kv: KVCache, fingerprint: Fingerprint, digest: bool, transport: str
    ) -> SessionSettings:
        limits: dict[str, Any] = {"max_inflight_bytes": max_inflight_bytes, "link_timeout_s": link_timeout_s}
        return SessionSettings(ref, fingerprint, kv, digest=digest, transport=transport, **limits)

    server = grpc.aio.server(options=server_options())
    port = server.add_insecure_port("127.0.0.1:0")
    decode = Decode(settings(DECODE, target, FINGERPRINT, digest, transports[1]), planner, changed)
    its_digest = digest if prefill_digest is None else prefill_digest
    prefill = Prefill(settings(PREFILL, source, prefill_pairing, its_digest, transports[0]), planner, changed)
    decode.sessions.add_to(server)
    await server.start()
    try:
        yield Pair(prefill, decode, f"127.0.0.1:{port}", changed)
    finally:
        await prefill.sessions.close()
        await decode.sessions.close()
        prefill.loop.close()
        decode.loop.close()
        await server.stop(0)


async def ship(
    cluster: Pair, name: str, *, seed: int = 1, step: int = 24, first_token: int = 0, num_tokens: int = NUM_TOKENS
) -> TransferId:
    """Start a transfer and compute all of it."""
    transfer_id = new_transfer_id(name)
    cluster.decode.expect(transfer_id, TARGET_TABLE, num_tokens, first_token)
    cluster.prefill.start(transfer_id, cluster.address, SOURCE_TABLE, num_tokens, first_token)
    await cluster.prefill.compute(transfer_id, SOURCE_TABLE, request_rows(seed, num_tokens), step, first_token)
    return transfer_id


async def check_works(cluster: Pair, name: str = "canary") -> None:
    """A fresh request goes through byte for byte on the same pair."""
    fill(cluster.decode.kv, -1.0)
    transfer_id = await ship(cluster, name, seed=99)
    assert await cluster.until_ended(transfer_id) is TransferOutcome.DONE
    assert torch.equal(rows_of(cluster.decode.kv, TARGET_TABLE, NUM_TOKENS), request_rows(99, NUM_TOKENS))


async def drop(cluster: Pair) -> None:
    """End the link from the decode side, as a stall would, and wait until both know."""
    lost = len(cluster.prefill.lost), len(cluster.decode.lost)
    cluster.decode.sessions._peers[PREFILL].end("dropped by the test")
    await cluster.wait_for(lambda: len(cluster.prefill.lost) > lost[0] and len(cluster.decode.lost) > lost[1])
