"""`/v1/completions` and `/v1/chat/completions`: from a body to an answer, whole or as a stream of events."""

import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from common.values.errors import RequestCancelled
from common.values.ids import RequestId
from router.core.generation import Accepted
from router.front.frontend import Frontend
from router.front.http.gate import tenant_of
from router.front.http.io import REQUEST_ID_HEADER, deadline_of, json_response, read_json, request_id_of
from router.front.http.stream import DONE, ClientGone, EventStream, sse_frame, until_disconnected
from router.front.openai.json_body import parse_body
from router.front.openai.render import (
    AnyChoice,
    ChatRenderer,
    CompletionRenderer,
    Renderer,
    RenderOptions,
    WholeChoice,
)
from router.front.openai.requests import ChatBody, CompletionBody, GenerationBody
from router.front.openai.responses import Answer
from router.front.openai.specs import chat_spec, completion_specs
from router.front.openai.usage import metrics_of, server_timing, usage_of, usage_of_counts
from router.front.output import Deltas, Summary
from router.request.spec import RequestSpec
from router.request.validation import ValidRequest
from router.tenants.tenants import Tenant
from router.text.choice_text import ChoiceDelta

TRACE_PARENT_HEADER = "traceparent"
_CLIENT_CLOSED_REQUEST = 499


@dataclass(frozen=True, slots=True)
class HttpSettings:
    max_body_bytes: int
    keep_alive_s: float
    allowed_origins: Sequence[str] = ()


@dataclass(slots=True)
class _Job:
    """One HTTP request: one or more prompts, each with `num_choices` choices, numbered through."""

    answer_id: str
    created: int
    renderer: Renderer
    body: GenerationBody
    requests: list[ValidRequest]
    tenant: Tenant
    accepted: Accepted | None = None  # the first
    num_cached_tokens: int = 0  # of all prompts accepted so far
    num_completion_tokens: int = 0  # that the client was given so far

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
        return self.requests[0].generation.num_choices

    def echo_text(self, index: int) -> str:
        return self.requests[index // self.num_choices].echo_text or ""


class GenerationEndpoints:
    """Stateless: everything of a request is in its `_Job`."""

    def __init__(self, frontend: Frontend, settings: HttpSettings) -> None:
        self._frontend = frontend
        self._settings = settings
        self._chat_decoder = msgspec.json.Decoder(ChatBody)
        self._completion_decoder = msgspec.json.Decoder(CompletionBody)

    async def chat(self, request: Request) -> Response:
        body = parse_body(await read_json(request, self._settings.max_body_bytes), self._chat_decoder)
        spec = chat_spec(body, deadline_of(request))
        has_reasoning = body.include_reasoning is not False
        options = RenderOptions(bool(body.logprobs), body.top_logprobs or 0, bool(body.return_token_ids), has_reasoning)
        return await self._answer(request, "chatcmpl", body, [spec], ChatRenderer(options, self._frontend.token_texts))

    async def completions(self, request: Request) -> Response:
        body = parse_body(await read_json(request, self._settings.max_body_bytes), self._completion_decoder)
        specs = completion_specs(body, deadline_of(request))
        options = RenderOptions(body.logprobs is not None, body.logprobs or 0, bool(body.return_token_ids))
        renderer = CompletionRenderer(options, self._frontend.token_texts)
        return await self._answer(request, "cmpl", body, specs, renderer)

    async def _answer(
        self, request: Request, prefix: str, body: GenerationBody, specs: Sequence[RequestSpec], renderer: Renderer
    ) -> Response:
        answer_id = f"{prefix}-{secrets.token_hex(16)}"
        ids = [answer_id if idx == 0 else f"{answer_id}-{idx}" for idx in range(len(specs))]
        trace_parent, tenant = request.headers.get(TRACE_PARENT_HEADER, ""), tenant_of(request)
        tenant.check_prompts(len(specs))
        tenant.check_places(len(specs))
        requests = [
            await self._frontend.admit(spec, RequestId(prompt_id), tenant, trace_parent)
            for spec, prompt_id in zip(specs, ids, strict=True)
        ]
        job = _Job(answer_id, int(time.time()), renderer, body, requests, tenant)
        request_id = request_id_of(request)
        if body.stream:
            return EventStream(
                self._frames(job), lambda: _headers(job, request_id), request_id, self._settings.keep_alive_s
            )
        try:
            async with until_disconnected(request.scope):
                return await self._whole(job, request_id)
        except ClientGone:
            return Response(status_code=_CLIENT_CLOSED_REQUEST)

    async def _whole(self, job: _Job, request_id: str) -> Response:
        choices = [WholeChoice(index) for index in range(len(job.requests) * job.num_choices)]
        for choice in choices:
            choice.texts.append(job.echo_text(choice.index))
        summaries: list[Summary] = []
        async with self._frontend.run_all(job.requests) as updates:
            async for prompt_idx, update in updates:
                match update:
                    case Accepted():
                        job.accept(update)
                    case Deltas():
                        _check_not_aborted(update)
                        for delta in update.deltas:
                            choices[prompt_idx * job.num_choices + delta.choice_idx].add(delta)
                    case Summary():
                        summaries.append(update)
        return self._whole_response(job, request_id, choices, summaries)

    def _whole_response(
        self, job: _Job, request_id: str, choices: Sequence[WholeChoice], summaries: Sequence[Summary]
    ) -> Response:
        rendered = [job.renderer.whole(choice) for choice in choices]
        answer = self._answer_of(job, job.renderer.whole_object, rendered)
        answer.usage = usage_of(summaries)
        if job.body.return_timings:
            answer.metrics = metrics_of(_slowest(summaries).timings, answer.usage.completion_tokens)
        if job.body.return_token_ids:
            answer.prompt_token_ids = list(job.requests[0].generation.token_ids)
        headers = _headers(job, request_id) | {
            "x-pdserve-cached-tokens": str(answer.usage.prompt_tokens_details.cached_tokens),
            "server-timing": server_timing(_slowest(summaries).timings),
        }
        return json_response(answer, headers=headers)

    async def _frames(self, job: _Job) -> AsyncGenerator[bytes, None]:
        opened: set[int] = set()
        summaries: list[Summary] = []
        async with self._frontend.run_all(job.requests) as updates:
            async for prompt_idx, update in updates:
                match update:
                    case Accepted():
                        job.accept(update)
                    case Deltas():
                        first_index = prompt_idx * job.num_choices
                        yield b"".join(self._chunk(job, first_index, delta, opened) for delta in update.deltas)
                        _check_not_aborted(update)
                    case Summary():
                        summaries.append(update)
        yield self._last_frames(job, summaries)

    def _chunk(self, job: _Job, first_index: int, delta: ChoiceDelta, opened: set[int]) -> bytes:
        """The event for `delta`, after those that open the choice when it is the first."""
        index = first_index + delta.choice_idx
        job.num_completion_tokens += len(delta.tokens)
        opening = [] if index in opened else job.renderer.opening(index, job.echo_text(index))
        opened.add(index)
        return b"".join(self._frame(job, [choice]) for choice in (*opening, *job.renderer.chunks(index, delta)))

    def _last_frames(self, job: _Job, summaries: Sequence[Summary]) -> bytes:
        usage = usage_of(summaries)
        metrics = metrics_of(_slowest(summaries).timings, usage.completion_tokens) if job.body.return_timings else UNSET
        if not job.body.include_usage and metrics is UNSET:
            return DONE
        answer = self._answer_of(job, job.renderer.chunk_object, [])
        answer.usage = usage if job.body.include_usage else UNSET
        answer.metrics = metrics
        return sse_frame(answer) + DONE

    def _frame(self, job: _Job, choices: list[AnyChoice]) -> bytes:
        answer = self._answer_of(job, job.renderer.chunk_object, choices)
        if job.body.continuous_usage:
            answer.usage = usage_of_counts(job.num_prompt_tokens, job.num_completion_tokens, job.num_cached_tokens)
        elif job.body.include_usage:
            answer.usage = None
        return sse_frame(answer)

    def _answer_of(self, job: _Job, kind: str, choices: list[AnyChoice]) -> Answer[AnyChoice]:
        return Answer(job.answer_id, kind, job.created, self._frontend.model.name, choices)


def _headers(job: _Job, request_id: str) -> dict[str, str]:
    headers = {REQUEST_ID_HEADER: request_id, **job.tenant.headers()}
    if job.accepted is not None:
        headers["x-pdserve-decode-worker"] = job.accepted.decode_worker_id
        headers["x-pdserve-cached-tokens"] = str(job.accepted.num_cached_tokens)
        if job.accepted.prefill_worker_id:
            headers["x-pdserve-prefill-worker"] = job.accepted.prefill_worker_id
    return headers


def _check_not_aborted(update: Deltas) -> None:
    """Raises RequestCancelled."""
    if any(delta.end is not None and delta.end.reason is None for delta in update.deltas):
        raise RequestCancelled("the request was aborted, as its client asked")


def _slowest(summaries: Sequence[Summary]) -> Summary:
    return max(summaries, key=lambda summary: summary.timings.wall_s)
