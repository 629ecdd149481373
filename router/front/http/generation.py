"""`/v1/completions` and `/v1/chat/completions`: from a body to an answer, whole or as a stream of events."""

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from common.values.ids import RequestId
from common.values.request import PromptLogprobs
from router.core.generation import Accepted
from router.front.frontend import Frontend
from router.front.http.gate import tenant_of
from router.front.http.io import REQUEST_ID_HEADER, deadline_of, json_response, read_json, request_id_of
from router.front.http.leaving import ClientGone, until_disconnected
from router.front.http.stream import EventStream, Job, StreamedAnswer, check_not_aborted
from router.front.openai.json_body import parse_body
from router.front.openai.render import (
    ChatRenderer,
    CompletionRenderer,
    Renderer,
    RenderOptions,
    WholeChoice,
    prompt_logprobs_of,
)
from router.front.openai.requests import ChatBody, CompletionBody, GenerationBody
from router.front.openai.specs import chat_spec, completion_specs
from router.front.openai.usage import metrics_of, server_timing, timings_of, usage_of
from router.front.output import Deltas, Summary
from router.front.scored_prompt import ScoredPrompt
from router.request.spec import RequestSpec
from router.request.validation import ValidRequest
from router.tenants.tenants import Tenant

TRACE_PARENT_HEADER = "traceparent"
CLIENT_CLOSED_REQUEST = 499


@dataclass(frozen=True, slots=True)
class HttpSettings:
    max_body_bytes: int
    keep_alive_s: float
    allowed_origins: Sequence[str] = ()


class GenerationEndpoints:
    """Stateless: everything of a request is in its `Job`."""

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
        name = requests[0].generation.adapter_name or self._frontend.model.name
        job = Job(answer_id, name, int(time.time()), renderer, body, requests, prompts, tenant)
        request_id = request_id_of(request)
        if body.stream:
            return EventStream(
                StreamedAnswer(job, self._frontend.answers).frames(),
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

    async def _whole(self, job: Job, request_id: str) -> Response:
        num_choices = len(job.requests) * job.num_choices
        choices = [WholeChoice(index, job.prompt(index)) for index in range(num_choices)]
        summaries: list[Summary] = []
        async with self._frontend.answers.run_all(job.requests) as updates:
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
        self, job: Job, request_id: str, choices: Sequence[WholeChoice], summaries: Sequence[Summary]
    ) -> Response:
        rendered = [job.renderer.whole(choice) for choice in choices]
        answer = job.answer(job.renderer.whole_object, rendered)
        answer.usage = usage_of(summaries)
        if job.body.return_timings:
            answer.metrics = metrics_of(timings_of(summaries), answer.usage.completion_tokens)
        if job.body.return_token_ids:
            answer.prompt_token_ids = list(job.requests[0].generation.token_ids)
        if isinstance(job.renderer, ChatRenderer):
            num_top = job.body.prompt_logprobs
            answer.prompt_logprobs = prompt_logprobs_of(job.prompts[0], num_top, self._frontend.token_texts)
        headers = answer_headers(request_id, job.tenant, job.accepted) | {
            "x-pdserve-cached-tokens": str(answer.usage.prompt_tokens_details.cached_tokens),
            "server-timing": server_timing(timings_of(summaries)),
        }
        return json_response(answer, headers=headers)


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
