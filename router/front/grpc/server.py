"""`pdserve.v1.GenerationService` over the front end, with health and reflection."""

import asyncio
import re
import secrets

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from common.values.errors import BodyTooLarge, DeadlineExceeded, InvalidRequest, PdserveError
from common.values.ids import RequestId
from common.wire.grpc_options import Options, server_options
from common.wire.pb import generation_pb2 as pb
from common.wire.pb import generation_pb2_grpc
from router.front.frontend import Frontend
from router.front.grpc.call import GenerateCall
from router.front.grpc.errors import Context, guarded
from router.front.grpc.gate import HEALTH_NAME, GrpcGate
from router.front.grpc.health import ReadinessHealth
from router.front.grpc.requests import generate_spec, prompt_of, tool_use_in
from router.front.grpc.responses import (
    model_info_pb,
    workers_pb,
)
from router.front.ports import PortInUse
from router.request import limits
from router.tenants.access import Access
from router.tenants.tenants import Tenant

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name
_REQUEST_ID = re.compile(rf"[\x21-\x7e]{{1,{limits.MAX_REQUEST_ID_LENGTH}}}")
_DEFAULT_WATCH_INTERVAL_S = 1.0


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Stateless: a call's state is in its `GenerateCall`."""

    def __init__(self, frontend: Frontend, max_request_bytes: int, gate: GrpcGate) -> None:
        self._frontend = frontend
        self._gate = gate
        self._max_request_bytes = max_request_bytes

    @guarded
    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        self._check_size(request.ByteSize())
        spec = generate_spec(request, _time_remaining_s(context))
        tenant = self._gate.tenant(context)
        request_id = _request_id(request.request_id, tenant)
        valid = await self._frontend.admit(spec, request_id, tenant, _trace_parent(context))
        request.request_id = request.request_id or request_id
        await context.send_initial_metadata((("x-request-id", request.request_id), *tenant.headers().items()))
        await GenerateCall(request, valid, self._frontend, context).run()

    @guarded
    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        if len(request.request_ids) > limits.MAX_ABORT_IDS:
            raise InvalidRequest(f"request_ids holds more than {limits.MAX_ABORT_IDS} ids", param="request_ids")
        tenant = self._gate.tenant(context)
        aborted = [text for text in request.request_ids if self._abort(text, tenant)]
        return pb.AbortResponse(aborted_request_ids=aborted)

    @guarded
    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        self._check_size(request.ByteSize())
        self._frontend.validator.check_model(request.model)
        token_ids = await self._frontend.tokenize(prompt_of(request, tool_use_in(request)))
        return pb.TokenizeResponse(token_ids=token_ids, max_model_len=self._frontend.model.max_model_len)

    @guarded
    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        self._check_size(request.ByteSize())
        self._frontend.validator.check_model(request.model)
        return pb.DetokenizeResponse(prompt=await self._frontend.detokenize(request.token_ids, "token_ids"))

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

    def _abort(self, text: str, tenant: Tenant) -> bool:
        """By the id that the client stated, or by the one that it was given."""
        ids = dict.fromkeys((_scoped(text, tenant), RequestId(text)))
        return any(self._frontend.in_flight.abort(request_id, tenant.name) for request_id in ids)

    def note_refusal(self, error: PdserveError) -> None:
        self._frontend.note_refusal(error)

    def _check_size(self, size_bytes: int) -> None:
        if size_bytes > self._max_request_bytes:
            raise BodyTooLarge(f"the request has {size_bytes} bytes, at most {self._max_request_bytes} are allowed")


class GrpcServer:
    """A bound and started server. Raises PortInUse when another process listens there."""

    def __init__(
        self,
        frontend: Frontend,
        max_request_bytes: int,
        address: str,
        access: Access,
        credentials: grpc.ServerCredentials | None = None,
        max_connections: int | None = None,
    ) -> None:
        self._server = grpc.aio.server(options=_options(max_request_bytes, max_connections))
        gate = GrpcGate(access, frontend.note_refusal)
        servicer = GenerationServicer(frontend, max_request_bytes, gate)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, gate)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(ReadinessHealth(frontend.readiness, SERVICE_NAME), gate)
        names = (SERVICE_NAME, HEALTH_NAME, reflection.SERVICE_NAME)
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(reflection.aio.ReflectionServicer(names), gate)
        self._server.add_generic_rpc_handlers((gate,))
        try:
            self.port = self._listen(address, credentials)
        except RuntimeError as error:
            raise PortInUse(f"cannot listen on {address}; choose another port with --grpc-port") from error

    def _listen(self, address: str, credentials: grpc.ServerCredentials | None) -> int:
        if credentials is None:
            return int(self._server.add_insecure_port(address))
        return int(self._server.add_secure_port(address, credentials))

    async def start(self) -> None:
        await self._server.start()

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls; those that go on after the grace are cut."""
        await self._server.stop(grace_s)


def _trace_parent(context: Context) -> str:
    """The client's trace, from the call's metadata."""
    metadata = dict(context.invocation_metadata() or ())
    value = metadata.get("traceparent", "")
    return value if isinstance(value, str) else ""


def _options(max_request_bytes: int, max_connections: int | None) -> Options:
    """A stranger's connection gets less than one of our own: fewer streams, less metadata, a time to shake hands in.

    gRPC closes a connection beyond `max_connections` (None: as many as come) without a word, and tells us nothing.
    """
    return [
        *server_options(max_request_bytes * limits.GRPC_HARD_LIMIT_FACTOR),
        ("grpc.max_concurrent_streams", limits.MAX_GRPC_STREAMS),
        ("grpc.max_metadata_size", limits.MAX_HEADER_BYTES),
        ("grpc.absolute_max_metadata_size", limits.MAX_HEADER_BYTES),
        ("grpc.server_handshake_timeout_ms", int(limits.HANDSHAKE_TIMEOUT_S * 1e3)),
        ("grpc.max_connection_idle_ms", int(limits.GRPC_IDLE_TIMEOUT_S * 1e3)),
        *([] if max_connections is None else [("grpc.max_allowed_incoming_connections", max_connections)]),
    ]


def _request_id(stated: str, tenant: Tenant) -> RequestId:
    if not stated:
        return RequestId(f"gen-{secrets.token_hex(16)}")
    if not _REQUEST_ID.fullmatch(stated):
        message = f"request_id must be 1 to {limits.MAX_REQUEST_ID_LENGTH} printable ASCII characters"
        raise InvalidRequest(message, param="request_id")
    return _scoped(stated, tenant)


def _scoped(stated: str, tenant: Tenant) -> RequestId:
    """A client's own id as we know it: no tenant can take, find or end another's."""
    return RequestId(stated if tenant.is_anonymous else f"{tenant.name}/{stated}")


def _time_remaining_s(context: Context) -> float | None:
    """The client's deadline as time left; None when it set none."""
    remaining_s: float | None = context.time_remaining()
    if remaining_s is None:
        return None
    if remaining_s < limits.MIN_DEADLINE_S:
        raise DeadlineExceeded("the deadline had passed when the request arrived")
    return min(remaining_s, limits.MAX_DEADLINE_S)
