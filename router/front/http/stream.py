"""Answers as server-sent events: the stream, and the events of a generation.

`EventStream` owns the connection of one request: it sees the client leave, keeps an idle stream alive with comments,
and cuts a client that stopped reading.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import msgspec
from msgspec import UNSET
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from common.values.errors import PdserveError, RequestCancelled
from common.values.request import PromptLogprobs
from router.core.generation import Accepted
from router.front.http.io import error_body, error_response, rates_of
from router.front.http.leaving import ClientGone, connection_of, until_disconnected
from router.front.openai.render import AnyChoice, Renderer
from router.front.openai.requests import GenerationBody
from router.front.openai.responses import Answer
from router.front.openai.usage import metrics_of, timings_of, usage_of, usage_of_counts
from router.front.output import Answers, Deltas, Summary
from router.front.scored_prompt import ScoredPrompt
from router.observe.error_reports import internal_error
from router.request import limits
from router.request.validation import ValidRequest
from router.tenants.tenants import Tenant
from router.text.choice_text import ChoiceDelta

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
# Line ends for `str.splitlines`, though not for JSON: a client that splits that way must not cut an event.
_LINE_ENDS = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))
_encoder = msgspec.json.Encoder()
# In no name, id or text.
_MARK = secrets.token_hex(16)


def sse_frame(value: object, name: str = "") -> bytes:
    """One server-sent event."""
    data = _on_one_line(_encoder.encode(value))
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data) if name else b"data: %b\n\n" % data


def sse_text(text: str) -> bytes:
    """A text as it stands in an event, quotes included."""
    return _on_one_line(_encoder.encode(text))


def _on_one_line(data: bytes) -> bytes:
    if not data.isascii():
        for raw, escaped in _LINE_ENDS:
            data = data.replace(raw, escaped)
    return data


class EventStream(Response):
    """A stream of server-sent events from `frames`, made by the client's leaving into a cancelled generator.

    Nothing is sent before the first frame or keep-alive, so that an error before it still has its HTTP status.
    An error after it is one `error` event, and the stream ends without [DONE].
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        stream_headers: Callable[[], dict[str, str]],
        request_id: str,
        keep_alive_s: float,
    ) -> None:
        super().__init__()
        self._frames = frames
        self._stream_headers = stream_headers
        self._request_id = request_id
        self._keep_alive_s = keep_alive_s
        self._lock = asyncio.Lock()
        self._is_started = False
        self._written_s = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def keep_alive() -> None:
            if time.monotonic() - self._written_s >= self._keep_alive_s / 2:
                await self._write(scope, send, KEEP_ALIVE)

        try:
            async with until_disconnected(scope, keep_alive, self._keep_alive_s):
                await self._answer(scope, receive, send)
        except ClientGone:
            connection_of(scope).abort()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._frames):
                async for frame in self._frames:
                    await self._write(scope, send, frame)
        except PdserveError as error:
            await self._fail(error, scope, receive, send)
        except ClientGone:
            raise
        except Exception as error:
            await self._fail(internal_error(error), scope, receive, send)
        else:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _fail(self, error: PdserveError, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._is_started:
            await error_response(error, self._request_id, rates_of(scope))(scope, receive, send)
            return
        await self._write(scope, send, sse_frame(error_body(error)), more_body=False)

    async def _write(self, scope: Scope, send: Send, data: bytes, *, more_body: bool = True) -> None:
        async with self._lock:
            if not self._is_started:
                self._is_started = True
                await _send_in_time(scope, send, self._start())
            await _send_in_time(scope, send, {"type": "http.response.body", "body": data, "more_body": more_body})
            self._written_s = time.monotonic()

    def _start(self) -> Message:
        headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
        headers |= {"x-accel-buffering": "no", **self._stream_headers()}
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        return {"type": "http.response.start", "status": 200, "headers": raw}


async def _send_in_time(scope: Scope, send: Send, message: Message) -> None:
    """Raises ClientGone when the client takes nothing for too long."""
    if not connection_of(scope).may_wait:  # a timer for each write costs more than the write
        await send(message)
        return
    try:
        async with asyncio.timeout(limits.WRITE_TIMEOUT_S):
            await send(message)
    except TimeoutError:
        raise ClientGone from None


@dataclass(slots=True)
class Job:
    """One HTTP request: one or more prompts, each with `num_choices` choices, numbered through."""

    answer_id: str
    model: str
    created: int
    renderer: Renderer
    body: GenerationBody
    requests: list[ValidRequest]
    prompts: list[ScoredPrompt]
    tenant: Tenant
    accepted: Accepted | None = None  # the first
    num_cached_tokens: int = 0  # of all prompts accepted so far

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(request.generation.token_ids) for request in self.requests)

    def accept(self, accepted: Accepted) -> None:
        """One of the prompts is placed."""
        self.accepted = self.accepted or accepted
        self.num_cached_tokens += accepted.num_cached_tokens

    @property
    def num_choices(self) -> int:
        """Of each prompt."""
        return self.requests[0].generation.num_returned

    def prompt(self, index: int) -> ScoredPrompt:
        """That of a choice."""
        return self.prompts[index // self.num_choices]

    def answer(self, kind: str, choices: list[AnyChoice]) -> Answer[AnyChoice]:
        return Answer(self.answer_id, kind, self.created, self.model, choices)


def is_plain(delta: ChoiceDelta) -> bool:
    """Most deltas: content alone, or reasoning alone."""
    return bool(delta.text) != bool(delta.reasoning) and delta.end is None and not delta.calls


class PlainFrames:
    """Of one answer whose events tell neither tokens nor counts.

    `render`: the ordinary frame of a choice's delta. It is asked once for each choice and kind of text; encoding the
    whole object for every token took most of the time of a streamed token's way out.
    """

    def __init__(self, render: Callable[[int, ChoiceDelta], bytes]) -> None:
        self._render = render
        self._around: dict[tuple[int, bool], list[bytes]] = {}

    def frame(self, index: int, delta: ChoiceDelta) -> bytes:
        """The event of a plain delta of the answer's choice `index`."""
        key = index, bool(delta.text)
        around = self._around.get(key)
        if around is None:
            marked = ChoiceDelta(delta.choice_idx, (), _MARK if delta.text else "", reasoning=delta.reasoning and _MARK)
            around = self._around[key] = self._render(index, marked).split(sse_text(_MARK))
        return sse_text(delta.text or delta.reasoning).join(around)


class StreamedAnswer:
    """The events of one HTTP request, made from what the front end says of its prompts."""

    def __init__(self, job: Job, answers: Answers) -> None:
        self._job = job
        self._answers = answers
        self._num_completion_tokens = 0  # that the client was given so far
        is_plain_only = not (job.renderer.tells_tokens or job.body.continuous_usage)
        self._plain_frames = PlainFrames(self._rendered) if is_plain_only else None

    async def frames(self) -> AsyncGenerator[bytes, None]:
        job = self._job
        opened: set[int] = set()
        summaries: list[Summary] = []
        async with self._answers.run_all(job.requests) as updates:
            async for prompt_idx, update in updates:
                match update:
                    case Deltas():
                        first_index = prompt_idx * job.num_choices
                        for delta in update.deltas:
                            for frame in self._opening(first_index + delta.choice_idx, opened):
                                yield frame
                        if frames := b"".join(self._chunk(first_index, delta) for delta in update.deltas):
                            yield frames  # nothing written, nothing that puts off a keep-alive
                        check_not_aborted(update)
                    case Accepted():
                        job.accept(update)
                    case PromptLogprobs():
                        job.prompts[prompt_idx].pieces.append(update)
                    case Summary():
                        summaries.append(update)
        yield self._last_frames(summaries)

    def _opening(self, index: int, opened: set[int]) -> Iterator[bytes]:
        """The events before the first output of a choice."""
        if index not in opened:
            opened.add(index)
            for choice in self._job.renderer.opening(index, self._job.prompt(index)):
                yield self._frame([choice])

    def _chunk(self, first_index: int, delta: ChoiceDelta) -> bytes:
        index = first_index + delta.choice_idx
        self._num_completion_tokens += len(delta.tokens)
        if self._plain_frames is not None and is_plain(delta):
            return self._plain_frames.frame(index, delta)
        return self._rendered(index, delta)

    def _rendered(self, index: int, delta: ChoiceDelta) -> bytes:
        chunks = self._job.renderer.chunks(index, delta, self._job.prompt(index))
        return b"".join(self._frame([choice]) for choice in chunks)

    def _frame(self, choices: list[AnyChoice]) -> bytes:
        job = self._job
        answer = job.answer(job.renderer.chunk_object, choices)
        if job.body.continuous_usage:
            answer.usage = usage_of_counts(job.num_prompt_tokens, self._num_completion_tokens, job.num_cached_tokens)
        elif job.body.include_usage:
            answer.usage = None
        return sse_frame(answer)

    def _last_frames(self, summaries: Sequence[Summary]) -> bytes:
        body, usage = self._job.body, usage_of(summaries)
        metrics = metrics_of(timings_of(summaries), usage.completion_tokens) if body.return_timings else UNSET
        if not body.include_usage and metrics is UNSET:
            return DONE
        answer = self._job.answer(self._job.renderer.chunk_object, [])
        answer.usage = usage if body.include_usage else UNSET
        answer.metrics = metrics
        return sse_frame(answer) + DONE


def check_not_aborted(update: Deltas) -> None:
    """Raises RequestCancelled."""
    if any(delta.end is not None and delta.end.reason is None for delta in update.deltas):
        raise RequestCancelled("the request was aborted, as its client asked")
