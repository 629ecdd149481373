"""Clients for the router's benchmark: bare HTTP over one kept connection, and a worker's stream without any router."""

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from common.values.ids import AttemptId, RequestId, RouterId, WorkerRef
from common.values.messages import (
    AttemptTokens,
    FirstTokens,
    Granted,
    Prefill,
    Reserve,
    RouterHello,
    RouterMessage,
    TokenBatch,
    WorkerMessage,
)
from common.values.request import SamplingParams, Work
from common.wire.convert import router_message_to_pb, worker_messages_from_pb
from common.wire.grpc_options import channel_options
from common.wire.pb import worker_pb2_grpc


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds from the request to the first and to the last part of its answer."""

    first_s: float
    last_s: float


class HttpClient:
    """One kept connection. A request at a time."""

    def __init__(self, port: int, model: str = "") -> None:
        self._port = port
        self._always = {"model": model} if model else {}
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 20)

    def close(self) -> None:
        self._writer.close()

    async def complete(self, prompt: str, max_tokens: int, *, stream: bool) -> Latency:
        """One completion; raises AssertionError when it is not whole."""
        fields = {"prompt": prompt, "max_tokens": max_tokens, "stream": stream}
        body = json.dumps(self._always | fields).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        )
        started_s = time.perf_counter()
        self._writer.write(head.encode() + b"\r\n\r\n" + body)
        answer_head = await self._reader.readuntil(b"\r\n\r\n")
        assert answer_head.startswith(b"HTTP/1.1 200"), answer_head
        if stream:
            return await self._events(started_s)
        length = next(line for line in answer_head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        await self._reader.readexactly(int(length.partition(b":")[2]))
        elapsed_s = time.perf_counter() - started_s
        return Latency(elapsed_s, elapsed_s)

    async def _events(self, started_s: float) -> Latency:
        await self._chunk()
        first_s, data = time.perf_counter() - started_s, b"x"
        is_done = False
        while data:
            data = await self._chunk()
            is_done |= b"[DONE]" in data
        assert is_done, "the stream ended early"
        return Latency(first_s, time.perf_counter() - started_s)

    async def _chunk(self) -> bytes:
        size = int(await self._reader.readuntil(b"\r\n"), 16)
        return (await self._reader.readexactly(size + 2))[:-2]


class DirectClient:
    """Asks the workers as the router does, without a router: what the answer costs by itself."""

    def __init__(self, prefill: "_Stream", decode: "_Stream", decode_address: str) -> None:
        self._prefill = prefill
        self._decode = decode
        self._decode_address = decode_address
        self._num_requests = 0

    async def generate(self, token_ids: tuple[int, ...], max_tokens: int) -> Latency:
        """Reserve, prefill, decode: the same messages as for one request through the router."""
        started_s = time.perf_counter()
        self._num_requests += 1
        attempt_id = AttemptId(RequestId(f"direct-{self._num_requests}"), 0)
        work = Work(attempt_id, token_ids, len(token_ids), SamplingParams(seed=1, max_tokens=max_tokens), (0,))
        await self._decode.write(Reserve(work, 0))
        await self._decode.until(Granted)
        prefill = Prefill(work, 0, WorkerRef("decode-0", "x"), self._decode_address, 0)
        await self._prefill.write(prefill)
        await self._prefill.until(FirstTokens)
        first_s = time.perf_counter() - started_s
        while max_tokens > 1:
            batch = await self._decode.until(TokenBatch)
            if any(_ends(attempt, attempt_id) for attempt in batch.attempts):
                break
        return Latency(first_s, time.perf_counter() - started_s)


@asynccontextmanager
async def direct_client(addresses: dict[str, str]) -> AsyncIterator[DirectClient]:
    """Two streams to the stub, under a router's name of its own."""
    async with (
        grpc.aio.insecure_channel(addresses["prefill"], options=channel_options()) as prefill_channel,
        grpc.aio.insecure_channel(addresses["decode"], options=channel_options()) as decode_channel,
    ):
        streams = [_Stream(worker_pb2_grpc.WorkerServiceStub(channel)) for channel in (prefill_channel, decode_channel)]
        for stream in streams:
            await stream.write(RouterHello(RouterId("direct")))
        yield DirectClient(streams[0], streams[1], addresses["decode"])
        for stream in streams:
            stream.close()


class _Stream:
    """To one worker."""

    def __init__(self, stub: Any) -> None:
        self._call = stub.Connect()
        self._received: deque[WorkerMessage] = deque()

    async def write(self, message: RouterMessage) -> None:
        await self._call.write(router_message_to_pb(message))

    async def until(self, kind: type) -> Any:
        """The next message of a kind; others before it are dropped."""
        while True:
            while self._received:
                if isinstance(message := self._received.popleft(), kind):
                    return message
            self._received.extend(worker_messages_from_pb(await self._call.read()))

    def close(self) -> None:
        self._call.cancel()


def _ends(attempt: AttemptTokens, attempt_id: AttemptId) -> bool:
    return attempt.attempt_id == attempt_id and attempt.tokens[-1].finish_reason is not None
