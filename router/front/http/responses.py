"""`/v1/responses`: from a body to a response, whole or as a stream of events. Nothing is kept after it."""

import secrets
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from common.values.errors import PdserveError
from common.values.ids import RequestId
from common.values.request import PromptLogprobs
from router.core.generation import Accepted
from router.front.frontend import Frontend
from router.front.http.gate import tenant_of
from router.front.http.generation import (
    CLIENT_CLOSED_REQUEST,
    TRACE_PARENT_HEADER,
    HttpSettings,
    answer_headers,
)
from router.front.http.io import deadline_of, json_response, read_json, request_id_of
from router.front.http.leaving import ClientGone, until_disconnected
from router.front.http.stream import DONE, EventStream, check_not_aborted, sse_frame
from router.front.openai.items.answers import ResponseAnswer, ResponseError
from router.front.openai.items.render import Event, ItemWriter, begun_answer, num_top_logprobs
from router.front.openai.items.requests import ResponseBody
from router.front.openai.items.specs import response_spec
from router.front.openai.json_body import parse_body
from router.front.openai.usage import server_timing
from router.front.output import Deltas, Summary
from router.observe.error_reports import internal_error
from router.request.validation import ValidRequest


@dataclass(slots=True)
class _Job:
    """One HTTP request."""

    request: ValidRequest
    answer: ResponseAnswer  # as it began
    writer: ItemWriter
    accepted: Accepted | None = None
    summary: Summary | None = None
    num_events: int = 0

    def frames(self, events: Iterable[Event]) -> bytes:
        return b"".join(map(self._frame, events))

    def frame_of(self, kind: str, answer: ResponseAnswer) -> bytes:
        return self._frame({"type": kind, "response": answer})

    def _frame(self, event: Event) -> bytes:
        event["sequence_number"] = self.num_events
        self.num_events += 1
        return sse_frame(event, event["type"])

    def finished(self) -> ResponseAnswer:
        assert self.summary is not None  # the last update
        return self.writer.finished(self.answer, self.summary, int(time.time()))


class ResponseEndpoint:
    """Stateless: everything of a request is in its `_Job`."""

    def __init__(self, frontend: Frontend, settings: HttpSettings) -> None:
        self._frontend = frontend
        self._settings = settings
        self._decoder = msgspec.json.Decoder(ResponseBody)

    async def create(self, request: Request) -> Response:
        body = parse_body(await read_json(request, self._settings.max_body_bytes), self._decoder)
        spec = response_spec(body, deadline_of(request))
        suffix, tenant, request_id = secrets.token_hex(16), tenant_of(request), request_id_of(request)
        tenant.check_places(1)
        trace_parent = request.headers.get(TRACE_PARENT_HEADER, "")
        valid = await self._frontend.admit(spec, RequestId(f"resp_{suffix}"), tenant, trace_parent)
        answer = begun_answer(
            body,
            valid.generation.request_id,
            int(time.time()),
            valid.generation.adapter_name or self._frontend.model.name,
            valid.generation.sampling,
        )
        job = _Job(valid, answer, ItemWriter(suffix, num_top_logprobs(body), self._frontend.token_texts))
        if body.stream:
            return EventStream(
                self._frames(job),
                lambda: answer_headers(request_id, tenant, job.accepted),
                request_id,
                self._settings.keep_alive_s,
            )
        try:
            async with until_disconnected(request.scope):
                async for _ in self._events(job):
                    pass
        except ClientGone:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        assert job.summary is not None
        headers = answer_headers(request_id, tenant, job.accepted)
        return json_response(job.finished(), headers={**headers, "server-timing": server_timing(job.summary.timings)})

    async def _frames(self, job: _Job) -> AsyncGenerator[bytes, None]:
        """An error after the first event is one more event."""
        try:
            async with aclosing(self._events(job)) as news:  # its place is given back before this ends
                async for events in news:
                    if job.num_events == 0:
                        yield job.frame_of("response.created", job.answer)
                        yield job.frame_of("response.in_progress", job.answer)
                    if frames := job.frames(events):
                        yield frames
        except Exception as error:
            if job.num_events == 0:
                raise
            yield self._failed(job, error if isinstance(error, PdserveError) else internal_error(error))
            return
        answer = job.finished()
        yield job.frame_of(f"response.{answer.status}", answer) + DONE

    def _failed(self, job: _Job, error: PdserveError) -> bytes:
        failed = msgspec.structs.replace(job.answer, status="failed", error=ResponseError(error.code, error.message))
        return job.frame_of("response.failed", failed) + DONE

    async def _events(self, job: _Job) -> AsyncGenerator[list[Event], None]:
        """None at first: the request is placed."""
        async with self._frontend.answers.run_all([job.request]) as updates:
            async for _, update in updates:
                match update:
                    case Accepted():
                        job.accepted = update
                        yield []
                    case PromptLogprobs():
                        pass
                    case Deltas():
                        for delta in update.deltas:
                            yield job.writer.push(delta)
                        check_not_aborted(update)
                    case Summary():
                        job.summary = update
