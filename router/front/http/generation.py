"""`/v1/completions` and `/v1/chat/completions`: from a body to an answer, whole or as a stream of events."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from common.values.errors import RequestCancelled
from common.values.ids import RequestId
from common.values.request import PromptLogprobs
from router.core.generation import Accepted
from router.front.frontend import Frontend
from router.front.http.frames import PlainFrames, is_plain
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
    prompt_logprobs_of,
)
from router.front.openai.requests import ChatBody, CompletionBody, GenerationBody
from router.front.openai.responses import Answer
from router.front.openai.specs import chat_spec, completion_specs
from router.front.openai.usage import metrics_of, server_timing, usage_of, usage_of_counts
from router.front.output import Deltas, Summary
from router.front.scored_prompt import ScoredPrompt
from router.request.spec import RequestSpec
from router.request.validation import ValidRequest
from router.tenants.tenants import Tenant
from router.text.choice_text import ChoiceDelta

TRACE_PARENT_HEADER = "traceparent"
CLIENT_CLOSED_REQUEST = 499


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
    prompts: list[ScoredPrompt]
    tenant: Tenant
    accepted: Accepted | None = None  # the first
    num_cached_tokens: int = 0  # of all prompts accepted so far
    num_completion_tokens: int = 0  # that the client was given so far
    plain_frames: PlainFrames | None = None  # where events tell nothing but text

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
        options = _render_options(body, has_logprobs=bool(body.logprobs), num_top=body.top_logprobs)
        options = replace(options, has_reasoning=body.include_reasoning is not False)
        return await self._answer(request, "chatcmpl", body, [spec], ChatRenderer(options, self._frontend.token_texts))

    async def completions(self, request: Request) -> Response:
        body = parse_body(await read_json(request, self._settings.max_body_bytes), self._completion_decoder)
        specs = completion_specs(body, deadline_of(request))
        options = _render_options(body, has_logprobs=body.logprobs is not None, num_top=body.logprobs)
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
        prompts = [await self._prompt_of(spec, valid) for spec, valid in zip(specs, requests, strict=True)]
        job = _Job(answer_id, int(time.time()), renderer, body, requests, prompts, tenant)
        request_id = request_id_of(request)
        if body.stream:
            if not (renderer.tells_tokens or body.continuous_usage):
                job.plain_frames = PlainFrames(lambda index, delta: self._rendered(job, index, delta))
            return EventStream(
                self._frames(job),
                lambda: answer_headers(request_id, tenant, job.accepted),
                request_id,
                self._settings.keep_alive_s,
            )
        try:
            async with until_disconnected(request.scope):
                return await self._whole(job, request_id)
        except ClientGone:
            return Response(status_code=CLIENT_CLOSED_REQUEST)

    async def _prompt_of(self, spec: RequestSpec, valid: ValidRequest) -> ScoredPrompt:
        text, token_ids = valid.echo_text or "", valid.generation.token_ids
        offsets = await self._frontend.prompt_offsets(token_ids, text) if spec.scores_echo else ()
        return ScoredPrompt(token_ids, text, offsets)

    async def _whole(self, job: _Job, request_id: str) -> Response:
        num_choices = len(job.requests) * job.num_choices
        choices = [WholeChoice(index, job.prompt(index)) for index in range(num_choices)]
        summaries: list[Summary] = []
        async with self._frontend.run_all(job.requests) as updates:
            async for prompt_idx, update in updates:
                match update:
                    case Accepted():
                        job.accept(update)
                    case PromptLogprobs():
                        job.prompts[prompt_idx].pieces.append(update)
                    case Deltas():
                        check_not_aborted(update)
                        for delta in update.deltas:
                            choices[prompt_idx * job.num_choices + delta.choice_idx].add(delta)
                    case Summary():
                        summaries.append(update)
        if any(prompt.pieces for prompt in job.prompts):  # perhaps ten thousands of numbers
            return await asyncio.to_thread(self._whole_response, job, request_id, choices, summaries)
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
        if isinstance(job.renderer, ChatRenderer):
            num_top = job.body.prompt_logprobs
            answer.prompt_logprobs = prompt_logprobs_of(job.prompts[0], num_top, self._frontend.token_texts)
        headers = answer_headers(request_id, job.tenant, job.accepted) | {
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
                    case PromptLogprobs():
                        job.prompts[prompt_idx].pieces.append(update)
                    case Deltas():
                        first_index = prompt_idx * job.num_choices
                        for delta in update.deltas:
                            for frame in self._opening(job, first_index + delta.choice_idx, opened):
                                yield frame
                        if frames := b"".join(self._chunk(job, first_index, delta) for delta in update.deltas):
                            yield frames  # nothing written, nothing that puts off a keep-alive
                        check_not_aborted(update)
                    case Summary():
                        summaries.append(update)
        yield self._last_frames(job, summaries)

    def _opening(self, job: _Job, index: int, opened: set[int]) -> Iterator[bytes]:
        """The events before the first output of a choice."""
        if index not in opened:
            opened.add(index)
            for choice in job.renderer.opening(index, job.prompt(index)):
                yield self._frame(job, [choice])

    def _chunk(self, job: _Job, first_index: int, delta: ChoiceDelta) -> bytes:
        index = first_index + delta.choice_idx
        job.num_completion_tokens += len(delta.tokens)
        if job.plain_frames is not None and is_plain(delta):
            return job.plain_frames.frame(index, delta)
        return self._rendered(job, index, delta)

    def _rendered(self, job: _Job, index: int, delta: ChoiceDelta) -> bytes:
        return b"".join(self._frame(job, [choice]) for choice in job.renderer.chunks(index, delta, job.prompt(index)))

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


def _render_options(body: GenerationBody, *, has_logprobs: bool, num_top: int | None) -> RenderOptions:
    return RenderOptions(has_logprobs, num_top or 0, body.prompt_logprobs, bool(body.return_token_ids))


def answer_headers(request_id: str, tenant: Tenant, accepted: Accepted | None) -> dict[str, str]:
    """`accepted`: where the request is computed, once that is known."""
    headers = {REQUEST_ID_HEADER: request_id, **tenant.headers()}
    if accepted is not None:
        headers["x-pdserve-decode-worker"] = accepted.decode_worker_id
        headers["x-pdserve-cached-tokens"] = str(accepted.num_cached_tokens)
        if accepted.prefill_worker_id:
            headers["x-pdserve-prefill-worker"] = accepted.prefill_worker_id
    return headers


def check_not_aborted(update: Deltas) -> None:
    """Raises RequestCancelled."""
    if any(delta.end is not None and delta.end.reason is None for delta in update.deltas):
        raise RequestCancelled("the request was aborted, as its client asked")


def _slowest(summaries: Sequence[Summary]) -> Summary:
    return max(summaries, key=lambda summary: summary.timings.wall_s)
