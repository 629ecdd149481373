"""`pdserve.v1.GenerationService` over the front end, with health and reflection."""

import asyncio
import re
import secrets
from contextlib import aclosing

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from common.errors import BodyTooLarge, DeadlineExceeded, InvalidRequest, PdserveError, WorkerFailed
from common.grpc_options import server_options
from common.ids import RequestId
from common.pb import generation_pb2 as pb
from common.pb import generation_pb2_grpc
from router import limits
from router.frontend import Deltas, Frontend, Summary, Update
from router.generation import Accepted
from router.grpc_errors import Context, guarded
from router.grpc_health import ReadinessHealth
from router.grpc_requests import generate_spec, prompt_of
from router.grpc_responses import (
    accepted_pb,
    chunk_pb,
    echo_pb,
    finished_pb,
    model_info_pb,
    workers_pb,
)
from router.listening import PortInUse
from router.text import ChoiceDelta, ChoiceEnd
from router.validation import ValidRequest

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name
_REQUEST_ID = re.compile(rf"[\x21-\x7e]{{1,{limits.MAX_REQUEST_ID_LENGTH}}}")
_DEFAULT_WATCH_INTERVAL_S = 1.0


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Stateless: a call's state is in its `_Call`."""

    def __init__(self, frontend: Frontend, max_request_bytes: int) -> None:
        self._frontend = frontend
        self._max_request_bytes = max_request_bytes

    @guarded
    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        self._check_size(request.ByteSize())
        spec = generate_spec(request, _time_remaining_s(context))
        valid = await self._frontend.admit(spec, _request_id(request.request_id))
        await context.send_initial_metadata((("x-request-id", valid.generation.request_id),))
        await _Call(request, valid, self._frontend, context).run()

    @guarded
    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        if len(request.request_ids) > limits.MAX_ABORT_IDS:
            raise InvalidRequest(f"request_ids holds more than {limits.MAX_ABORT_IDS} ids", param="request_ids")
        aborted = [text for text in request.request_ids if self._frontend.in_flight.abort(RequestId(text))]
        return pb.AbortResponse(aborted_request_ids=aborted)

    @guarded
    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        self._check_size(request.ByteSize())
        self._frontend.validator.check_model(request.model)
        token_ids = await self._frontend.tokenize(prompt_of(request))
        return pb.TokenizeResponse(token_ids=token_ids, max_model_len=self._frontend.model.max_model_len)

    @guarded
    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        self._check_size(request.ByteSize())
        self._frontend.validator.check_model(request.model)
        return pb.DetokenizeResponse(prompt=self._frontend.detokenize(request.token_ids, "token_ids"))

    @guarded
    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:
        self._frontend.validator.check_model(request.model)
        return model_info_pb(self._frontend.model, self._frontend.service.state())

    @guarded
    async def GetClusterState(self, request: pb.GetClusterStateRequest, context: Context) -> pb.GetClusterStateResponse:
        return pb.GetClusterStateResponse(workers=workers_pb(self._frontend.service.state()))

    @guarded
    async def WatchClusterState(self, request: pb.WatchClusterStateRequest, context: Context) -> None:
        """A state per interval until the client leaves or the server stops."""
        interval_s = request.interval.ToTimedelta().total_seconds() or _DEFAULT_WATCH_INTERVAL_S
        if interval_s < limits.MIN_WATCH_INTERVAL_S:
            raise InvalidRequest(f"interval must be at least {limits.MIN_WATCH_INTERVAL_S} s", param="interval")
        while True:
            state = self._frontend.service.state()
            await context.write(pb.WatchClusterStateResponse(workers=workers_pb(state)))
            await asyncio.sleep(interval_s)

    def note_refusal(self, error: PdserveError) -> None:
        self._frontend.note_refusal(error)

    def _check_size(self, size_bytes: int) -> None:
        if size_bytes > self._max_request_bytes:
            raise BodyTooLarge(f"the request has {size_bytes} bytes, at most {self._max_request_bytes} are allowed")


class _Call:
    """One `Generate`: writes what the front end tells it. Without `stream`, one chunk per choice at the end."""

    def __init__(self, request: pb.GenerateRequest, valid: ValidRequest, frontend: Frontend, context: Context) -> None:
        self._request = request
        self._valid = valid
        self._frontend = frontend
        self._context = context
        self._deltas: list[ChoiceDelta] = []
        self._ends: dict[int, ChoiceEnd] = {}
        self._echoed: set[int] = set()

    async def run(self) -> None:
        try:
            async with aclosing(self._frontend.run(self._valid)) as updates:
                async for update in updates:
                    await self._write_update(update)
        except WorkerFailed as error:
            if self._echoed or self._ends or self._deltas:
                error.grpc_code = "INTERNAL"  # ABORTED says that a retry is safe; output has been given already
            raise

    async def _write_update(self, update: Update) -> None:
        match update:
            case Accepted():
                await self._write(accepted=accepted_pb(update))
            case Deltas():
                for delta in update.deltas:
                    await self._take(delta)
            case Summary():
                await self._finish(update)

    async def _take(self, delta: ChoiceDelta) -> None:
        if delta.end is not None:
            self._ends[delta.choice_idx] = delta.end
        if self._request.stream:
            await self._write_chunk(delta)
        else:
            self._deltas.append(delta)

    async def _finish(self, summary: Summary) -> None:
        for index in range(self._valid.generation.num_choices):
            if not self._request.stream:
                await self._write_chunk(_joined(index, self._deltas))
            has_timings = self._request.output.return_timings
            await self._write(finished=finished_pb(index, self._ends[index], summary, has_timings=has_timings))

    async def _write_chunk(self, delta: ChoiceDelta) -> None:
        index = delta.choice_idx
        if index not in self._echoed:
            self._echoed.add(index)
            if self._valid.echo_text is not None:
                prompt = self._valid.generation.token_ids
                await self._write(chunk=echo_pb(index, prompt, self._valid.echo_text))
        num_logprobs = self._valid.generation.sampling.num_logprobs
        await self._write(chunk=chunk_pb(delta, num_logprobs, self._frontend.token_texts))

    async def _write(
        self,
        accepted: pb.Accepted | None = None,
        chunk: pb.TokenChunk | None = None,
        finished: pb.Finished | None = None,
    ) -> None:
        request_id = self._valid.generation.request_id
        await self._context.write(
            pb.GenerateResponse(request_id=request_id, accepted=accepted, chunk=chunk, finished=finished)
        )


class GrpcServer:
    """A bound and started server. Raises PortInUse when another process listens there."""

    def __init__(self, frontend: Frontend, max_request_bytes: int, address: str) -> None:
        self._server = grpc.aio.server(options=server_options(max_request_bytes * limits.GRPC_HARD_LIMIT_FACTOR))
        servicer = GenerationServicer(frontend, max_request_bytes)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, self._server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(ReadinessHealth(frontend.readiness, SERVICE_NAME), self._server)
        names = (SERVICE_NAME, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        try:
            self.port = int(self._server.add_insecure_port(address))
        except RuntimeError as error:
            raise PortInUse(f"cannot listen on {address}; choose another port with --grpc-port") from error

    async def start(self) -> None:
        await self._server.start()

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls; those that go on after the grace are cut."""
        await self._server.stop(grace_s)


def _joined(index: int, deltas: list[ChoiceDelta]) -> ChoiceDelta:
    own = [delta for delta in deltas if delta.choice_idx == index]
    tokens = tuple(token for delta in own for token in delta.tokens)
    return ChoiceDelta(index, tokens, "".join(delta.text for delta in own))


def _request_id(stated: str) -> RequestId:
    if not stated:
        return RequestId(f"gen-{secrets.token_hex(16)}")
    if not _REQUEST_ID.fullmatch(stated):
        message = f"request_id must be 1 to {limits.MAX_REQUEST_ID_LENGTH} printable ASCII characters"
        raise InvalidRequest(message, param="request_id")
    return RequestId(stated)


def _time_remaining_s(context: Context) -> float | None:
    """The client's deadline as time left; None when it set none."""
    remaining_s: float | None = context.time_remaining()
    if remaining_s is None:
        return None
    if remaining_s < limits.MIN_DEADLINE_S:
        raise DeadlineExceeded("the deadline had passed when the request arrived")
    return min(remaining_s, limits.MAX_DEADLINE_S)
