"""Clients under whom faults are made: both APIs, streaming or not, every answer compared with one process.

Owns the ledger: one entry per request, with the time of every token, so that pauses and errors can be told apart.
"""

import asyncio
import itertools
import json
import random
import socket
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import grpc
import httpx

from common.pb import generation_pb2, generation_pb2_grpc
from tests.chaos.lines import Broken, Line, Lines
from tests.cluster.load import VOCAB, Case
from tests.tiny_model import tiny_tokenizer

REQUEST_TIMEOUT_S = 120.0
# A client that comes back at once when the router does; `min` is what one attempt to connect may take.
_CHANNEL_OPTIONS = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 10_000),
]


class Api(StrEnum):
    HTTP_STREAM = "HTTP stream"
    HTTP_WHOLE = "HTTP"
    GRPC_STREAM = "gRPC stream"


class Outcome(StrEnum):
    RIGHT = "right"  # exactly the reference's tokens and text
    WRONG = "wrong"  # a success that differs from it, or tokens before an error that do
    ERROR = "error"  # an explicit error
    CUT = "cut"  # the connection broke
    LEFT = "left"  # the client went, as planned; what it had was right


@dataclass(frozen=True, slots=True)
class Question:
    """A request, and what the reference answers."""

    case: Case
    expected: tuple[int, ...]

    @property
    def text(self) -> str:
        decoded: str = tiny_tokenizer().decode(list(self.expected), skip_special_tokens=True)
        return decoded


@dataclass(slots=True)
class Entry:
    """One request as its client saw it. Times are of the monotonic clock."""

    request_id: str
    question: Question
    api: Api
    started_s: float
    cache_salt: str = ""  # nobody else's: the prompt has to be computed and shipped
    tokens: list[int] = field(default_factory=list)
    token_times_s: list[float] = field(default_factory=list)
    text: str = ""
    outcome: Outcome | None = None
    detail: str = ""
    ended_s: float = 0.0

    def add(self, token_ids: Sequence[int], text: str) -> None:
        self.tokens += token_ids
        self.text += text
        self.token_times_s += [time.monotonic()] * len(token_ids)

    def end(self, outcome: Outcome, detail: str = "") -> None:
        """`outcome` as the transport had it; the content decides whether it is worse."""
        expected = self.question.expected[: len(self.tokens)]
        if outcome is Outcome.RIGHT:
            expected = self.question.expected
            # The bytes of a character that the last token leaves incomplete are not shown.
            if self.text.rstrip("\ufffd") != self.question.text.rstrip("\ufffd"):
                outcome, detail = Outcome.WRONG, f"text {self.text!r}, expected {self.question.text!r}"
        if tuple(self.tokens) != tuple(expected):
            outcome, detail = Outcome.WRONG, f"{self.tokens}, expected {list(expected)} ({detail})"
        self.outcome, self.detail, self.ended_s = outcome, detail, time.monotonic()

    def was_running(self, at_s: float) -> bool:
        return self.started_s <= at_s and (self.outcome is None or self.ended_s > at_s)

    def gap_after(self, at_s: float) -> float | None:
        """From `at_s` to the next token; None when none came."""
        return next((token_s - at_s for token_s in self.token_times_s if token_s > at_s), None)

    def longest_wait_s(self, since_s: float = 0.0) -> float:
        """The longest wait for a token, the first included, that ended after `since_s`; a whole answer is one wait."""
        if self.api is Api.HTTP_WHOLE:
            return self.ended_s - self.started_s if self.ended_s > since_s else 0.0
        pairs = itertools.pairwise([self.started_s, *self.token_times_s])
        return max((later - earlier for earlier, later in pairs if later > since_s), default=0.0)


def make_questions(model: Path, cases: Iterable[Case]) -> list[Question]:
    """Asks the reference; some milliseconds per token."""
    return [Question(case, tuple(case.expected(model)[0])) for case in cases]


def mixed_cases(count: int, seed: int, *, longest_prompt: int = 200, longest_output: int = 120) -> list[Case]:
    """Prompts of which half begin like another one; short and long answers.

    A prompt ends in a whole character, else the first bytes of the answer could complete it.
    """
    rng = random.Random(seed)
    last = tiny_tokenizer().encode("a", add_special_tokens=False).ids
    prefixes = [rng.choices(VOCAB, k=longest_prompt // 2) for _ in range(max(1, count // 8))]
    cases = []
    for idx in range(count):
        shared = rng.choice(prefixes) if idx % 2 else []
        own = rng.choices(VOCAB, k=rng.randint(1, max(1, longest_prompt - len(shared))))
        temperature = rng.choice((0.0, 1.0))
        num_tokens = rng.randint(max(1, longest_output // 4), longest_output)
        cases.append(Case((*shared, *own, *last), rng.randrange(1 << 40), temperature, num_tokens))
    return cases


class Clients:
    """Keeps `at_once` requests going until told to stop. Owns the ledger.

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
        leaving_within_s: float = 0.4,
        unshared: float = 0.7,
        pause_s: float = 0.0,
    ) -> None:
        self.entries: list[Entry] = []
        self._url, self._grpc_address = url, grpc_address
        self.questions = questions
        self._at_once = at_once
        self._leaving, self._leaving_within_s = leaving, leaving_within_s
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

    async def ask(self, question: Question, api: Api, leave_after_s: float | None = None) -> Entry:
        """One request to its end, whatever that is."""
        name = next(self._names)
        entry = Entry(name, question, api, time.monotonic(), name if self._rng.random() < self._unshared else "")
        self.entries.append(entry)
        try:
            async with asyncio.timeout(leave_after_s):
                await (self._grpc(entry) if api is Api.GRPC_STREAM else self._over_http(entry))
        except TimeoutError:
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
            is_leaving = self._rng.random() < self._leaving
            entry = await self.ask(
                question, api, self._rng.uniform(0.0, self._leaving_within_s) if is_leaving else None
            )
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
        choice = reply.json()["choices"][0]
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
    choices = chunk["choices"]
    assert isinstance(choices, list)
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


def count_outcomes(entries: Iterable[Entry]) -> Counter[str]:
    return Counter(str(entry.outcome) for entry in entries)


def problems(entries: Iterable[Entry]) -> list[str]:
    """What is neither right nor planned, one line each."""
    fine = (Outcome.RIGHT, Outcome.LEFT)
    return [f"{e.request_id} {e.api} {e.outcome}: {e.detail[:300]}" for e in entries if e.outcome not in fine]
