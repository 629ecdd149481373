"""Clients under whom faults are made: both APIs, streaming or not, every answer compared with one process."""

import asyncio
import itertools
import json
import random
import socket
import statistics
import time
from collections import deque
from collections.abc import Sequence
from contextlib import aclosing

import grpc
import httpx

from common.wire.pb import generation_pb2, generation_pb2_grpc
from tests.chaos.ledger import Api, Entry, Leave, Left, Outcome, Question
from tests.chaos.lines import Broken, Line, Lines

REQUEST_TIMEOUT_S = 120.0
SHORTEST_STAY_S = 0.02  # a request needs as long to be sent at all
# A client that comes back at once when the router does; `min` is what one attempt to connect may take.
_CHANNEL_OPTIONS = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 10_000),
]


class Pace:
    """How fast answers have been lately: says when a client must go that wants to be gone before the end.

    A stream tells how far it is, and is left in its first two thirds: a client on a busy machine reads behind. A whole
    answer tells nothing: its client goes by the quickest of the last ones. One stream in four is left before its
    first token.
    """

    def __init__(self) -> None:
        self._first_s: deque[float] = deque(maxlen=20)
        self._whole_s_per_token: deque[float] = deque(maxlen=20)

    def note(self, entry: Entry) -> None:
        if entry.outcome is not Outcome.RIGHT:
            return
        if entry.api is Api.HTTP_WHOLE:
            self._whole_s_per_token.append((entry.ended_s - entry.started_s) / len(entry.tokens))
        else:
            self._first_s.append(entry.token_times_s[0] - entry.started_s)

    def leave(self, rng: random.Random, question: Question, api: Api) -> Leave:
        """A random moment before the end."""
        num_tokens = len(question.expected)
        if api is Api.HTTP_WHOLE:
            whole_s = min(self._whole_s_per_token, default=0.0) * num_tokens
            return Leave(num_tokens, max(SHORTEST_STAY_S, rng.uniform(0.1, 0.9) * whole_s))
        if rng.random() < 0.25:
            usual_s = statistics.median(self._first_s) if self._first_s else 0.0
            return Leave(1, max(SHORTEST_STAY_S, rng.uniform(0.2, 1.0) * usual_s))
        return Leave(rng.randint(1, max(1, num_tokens * 2 // 3)))


class Clients:
    """Keeps `at_once` requests going until it is stopped. Owns the ledger.

    Shares of the requests: `leaving` go before their answer is complete, `unshared` find nothing in a cache.
    """

    def __init__(
        self,
        url: str,
        grpc_address: str,
        questions: Sequence[Question],
        *,
        at_once: int = 6,
        seed: int = 0,
        leaving: float = 0.0,
        unshared: float = 0.7,
        pause_s: float = 0.0,
    ) -> None:
        self.entries: list[Entry] = []
        self._url, self._grpc_address = url, grpc_address
        self.questions = questions
        self._at_once = at_once
        self._leaving, self._leaving_due = leaving, 0.0
        self._pace = Pace()
        self._unshared = unshared
        self._pause_s = pause_s
        self._rng = random.Random(seed)
        self._is_stopping = False
        self._num_left: int | None = None
        self._names = (f"chaos-{self._rng.getrandbits(32):08x}-{number}" for number in itertools.count())
        self.tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Clients":
        self._lines = Lines(REQUEST_TIMEOUT_S)
        self._channel = grpc.aio.insecure_channel(self._grpc_address, options=_CHANNEL_OPTIONS)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self._lines.aclose()
        await self._channel.close()

    @property
    def ended(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.outcome is not None]

    def start(self, count: int | None = None) -> None:
        """Begin; `count` limits the number of requests."""
        self._num_left = count
        self.tasks = [asyncio.create_task(self._keep_asking()) for _ in range(self._at_once)]

    async def stop(self) -> None:
        """Ask nothing new and wait for what runs."""
        self._is_stopping = True
        await self.wait()

    async def wait(self) -> None:
        await asyncio.gather(*self.tasks)
        self.tasks = []

    async def ask(self, question: Question, api: Api, *, is_leaving: bool = False) -> Entry:
        """One request to its end, whatever that is."""
        name = next(self._names)
        salt = name if self._rng.random() < self._unshared else ""
        leave = self._pace.leave(self._rng, question, api) if is_leaving else None
        entry = Entry(name, question, api, time.monotonic(), salt, leave, name if api is Api.GRPC_STREAM else "")
        self.entries.append(entry)
        try:
            async with asyncio.timeout(leave.after_s if leave is not None else None):
                await (self._grpc(entry) if api is Api.GRPC_STREAM else self._over_http(entry))
            self._pace.note(entry)
        except (TimeoutError, Left):
            entry.end(Outcome.LEFT)
        except Broken as error:
            entry.end(Outcome.CUT, str(error))
        return entry

    async def ask_slowly(self, question: Question, silent_for_s: float) -> Entry:
        """A stream into a small buffer of which nothing is read for a while."""
        options = [(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)]
        line = Line(REQUEST_TIMEOUT_S, httpx.AsyncHTTPTransport(socket_options=options))
        async with aclosing(line):
            entry = Entry(next(self._names), question, Api.HTTP_STREAM, time.monotonic())
            self.entries.append(entry)
            await self._stream(entry, line, silent_for_s)
            return entry

    async def _keep_asking(self) -> None:
        while not self._is_stopping and self._num_left != 0:
            if self._num_left is not None:
                self._num_left -= 1
            question, api = self._rng.choice(self.questions), self._rng.choice(list(Api))
            self._leaving_due += self._leaving
            is_leaving = self._leaving_due >= 1.0
            self._leaving_due -= is_leaving
            entry = await self.ask(question, api, is_leaving=is_leaving)
            if self._pause_s or entry.outcome in (Outcome.ERROR, Outcome.CUT):
                await asyncio.sleep(max(self._pause_s, 0.2 if entry.outcome is not Outcome.RIGHT else 0.0))

    async def _over_http(self, entry: Entry) -> None:
        async with self._lines.one() as line:
            await (self._stream(entry, line) if entry.api is Api.HTTP_STREAM else self._whole(entry, line))

    async def _stream(self, entry: Entry, line: Line, silent_for_s: float = 0.0) -> None:
        body, headers = _body(entry), {"x-request-id": entry.request_id}
        async with line.http.stream(
            "POST", f"{self._url}/v1/completions", json=body, headers=headers, extensions=line.extensions
        ) as reply:
            if reply.status_code != 200:
                entry.end(Outcome.ERROR, f"{reply.status_code} {_error_type(await reply.aread())}")
                return
            await asyncio.sleep(silent_for_s)
            async for text in reply.aiter_lines():
                if text == "data: [DONE]" and entry.outcome is None:
                    entry.end(Outcome.RIGHT)
                elif text.startswith("data: "):
                    _take_chunk(entry, json.loads(text.removeprefix("data: ")))
        if entry.outcome is None:
            entry.end(Outcome.CUT, "the stream ended without [DONE]")

    async def _whole(self, entry: Entry, line: Line) -> None:
        body, headers = {**_body(entry), "stream": False}, {"x-request-id": entry.request_id}
        reply = await line.http.post(
            f"{self._url}/v1/completions", json=body, headers=headers, extensions=line.extensions
        )
        if reply.status_code != 200:
            entry.end(Outcome.ERROR, f"{reply.status_code} {_error_type(reply.content)}")
            return
        answer = reply.json()
        entry.answer_id, choice = answer["id"], answer["choices"][0]
        entry.add(choice["token_ids"], choice["text"])
        entry.end(Outcome.RIGHT)

    async def _grpc(self, entry: Entry) -> None:
        stub = generation_pb2_grpc.GenerationServiceStub(self._channel)  # type: ignore[no-untyped-call]
        is_finished = False
        call = stub.Generate(_grpc_request(entry), timeout=REQUEST_TIMEOUT_S)
        try:
            async for response in call:
                if response.HasField("chunk"):
                    entry.add(response.chunk.token_ids, response.chunk.text)
                is_finished = is_finished or response.HasField("finished")
            entry.end(Outcome.RIGHT if is_finished else Outcome.CUT)
        except grpc.aio.AioRpcError as error:
            entry.end(Outcome.ERROR, f"{error.code().name}: {error.details()}")
        finally:
            call.cancel()


def _body(entry: Entry) -> dict[str, object]:
    """Without the model's name: there is one."""
    body = {name: value for name, value in entry.question.case.body("").items() if name != "model"}
    return body | ({"cache_salt": entry.cache_salt} if entry.cache_salt else {})


def _take_chunk(entry: Entry, chunk: dict[str, object]) -> None:
    if "error" in chunk:
        error = chunk["error"]
        assert isinstance(error, dict)
        entry.end(Outcome.ERROR, f"{error.get('type')}: {error.get('message')}")
        return
    choices, answer_id = chunk["choices"], chunk["id"]
    assert isinstance(choices, list) and isinstance(answer_id, str)
    entry.answer_id = answer_id
    for choice in choices:
        entry.add(choice.get("token_ids") or [], choice.get("text") or "")


def _error_type(body: bytes) -> str:
    try:
        error = json.loads(body)["error"]
        return f"{error['type']}: {error['message']}"
    except (ValueError, KeyError):
        return repr(body[:80])


def _grpc_request(entry: Entry) -> generation_pb2.GenerateRequest:
    case = entry.question.case
    return generation_pb2.GenerateRequest(
        request_id=entry.request_id,
        token_ids=generation_pb2.TokenIds(ids=case.token_ids),
        cache_salt=entry.cache_salt,
        sampling=generation_pb2.SamplingParams(temperature=case.temperature, seed=case.seed),
        stop=generation_pb2.StopConditions(max_tokens=case.max_tokens, ignore_eos=True),
        stream=True,
    )
