"""The gRPC front end over a scripted service, on a real loopback port."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from common.wire.grpc_options import channel_options
from common.wire.pb import generation_pb2 as pb
from common.wire.pb import generation_pb2_grpc
from router.front.frontend import Frontend
from router.front.grpc.server import GrpcServer
from router.request.served_model import ServedModel
from router.tenants.access import Access
from tests.router.front.http_rig import MODEL, build_frontend, open_access
from tests.router.front.scripted_service import ScriptedService

DETAILS = (error_details_pb2.ErrorInfo, error_details_pb2.BadRequest, error_details_pb2.RetryInfo)


@dataclass
class GrpcRig:
    address: str
    frontend: Frontend
    channel: Any
    stub: Any

    async def generate(self, request: pb.GenerateRequest, **options: Any) -> list[pb.GenerateResponse]:
        return [response async for response in self.stub.Generate(request, **options)]


@asynccontextmanager
async def grpc_rig(
    service: ScriptedService,
    max_request_bytes: int = 1 << 20,
    access: Access | None = None,
    max_connections: int | None = None,
    model: ServedModel = MODEL,
) -> AsyncIterator[GrpcRig]:
    frontend = build_frontend(service, model)
    server = GrpcServer(
        frontend, max_request_bytes, "127.0.0.1:0", access or open_access(), max_connections=max_connections
    )
    await server.start()
    address = f"127.0.0.1:{server.port}"
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
        yield GrpcRig(address, frontend, channel, stub)
    await server.stop(1.0)
    assert frontend.in_flight.num_requests == 0


def details_of(error: grpc.aio.AioRpcError) -> dict[str, Any]:
    """The google.rpc details by message name."""
    status = rpc_status.from_call(error)
    assert status is not None
    found = {}
    for packed in status.details:
        for kind in DETAILS:
            if packed.Is(kind.DESCRIPTOR):
                message = kind()
                packed.Unpack(message)
                found[kind.__name__] = message
    return found


def text_of(responses: list[pb.GenerateResponse], index: int = 0) -> str:
    chunks = [response.chunk for response in responses if response.HasField("chunk")]
    return "".join(chunk.text for chunk in chunks if chunk.index == index)


def finishes_of(responses: list[pb.GenerateResponse]) -> list[pb.Finished]:
    return [response.finished for response in responses if response.HasField("finished")]
