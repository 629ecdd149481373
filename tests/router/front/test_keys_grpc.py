"""API keys over gRPC: refused on the metadata alone, with the status and details that clients expect."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from common.wire.pb import generation_pb2 as pb
from router.front.grpc.gate import NEEDS
from router.tenants.access import Need
from tests.router.front.grpc_rig import GrpcRig, details_of, grpc_rig, text_of
from tests.router.front.http_rig import ids, in_flight
from tests.router.front.keys_for_tests import ACME, ACME_OLD, ADMIN, OTHER, access, key_file
from tests.router.front.scripted_service import Pause, ScriptedService, accepted, always

pytestmark = pytest.mark.asyncio(loop_scope="module")
REQUEST = pb.GenerateRequest(prompt="x", stop=pb.StopConditions(max_tokens=4))
SERVICE = pb.DESCRIPTOR.services_by_name["GenerationService"]


def keyed(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig() -> AsyncIterator[GrpcRig]:
    async with grpc_rig(always(ids("ok")), access=access()) as rig:
        yield rig


async def refusal(rig: GrpcRig, method: str, request: bytes, metadata: Any = ()) -> grpc.aio.AioRpcError:
    """How a call ends that must not succeed; any method, any bytes."""
    call = rig.channel.unary_stream(method)(request, metadata=metadata, timeout=60)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await anext(aiter(call))
    return caught.value


@pytest.mark.parametrize("key", [ACME, ACME_OLD, OTHER], ids=["new", "old", "other"])
async def test_each_key_of_a_tenant_opens_the_service(rig: GrpcRig, key: str) -> None:
    assert text_of(await rig.generate(REQUEST, metadata=keyed(key))) == "ok"


async def test_what_every_method_needs_is_stated() -> None:
    assert {name for name, need in NEEDS.items() if need is Need.PUBLIC} == {
        "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch", "/grpc.health.v1.Health/List",
    }  # fmt: skip
    assert {f"/{SERVICE.full_name}/{method.name}" for method in SERVICE.methods} < set(NEEDS)


@pytest.mark.parametrize(
    "metadata",
    [(), keyed("wrong"), keyed(""), keyed(ADMIN), (("authorization", ACME),), (("authorization", f"bearer {ACME}"),),
     (*keyed(ACME), *keyed(ACME)), (("x-admin-key", ADMIN),), (("authorization", f"Bearer {ACME}x"),)],
)  # fmt: skip
@pytest.mark.parametrize("method", [name for name, need in NEEDS.items() if need is Need.TENANT])
async def test_a_method_is_closed_without_a_key_whatever_the_message_is(
    rig: GrpcRig, method: str, metadata: Any
) -> None:
    error = await refusal(rig, method, b"\xff no message", metadata)  # never parsed
    assert error.code() is grpc.StatusCode.UNAUTHENTICATED
    assert details_of(error)["ErrorInfo"].reason == "INVALID_API_KEY"


@pytest.mark.parametrize("method", [name for name, need in NEEDS.items() if need is Need.OPERATOR])
@pytest.mark.parametrize("metadata", [(), keyed(ACME), (("x-admin-key", ACME),)])
async def test_the_clusters_state_is_for_administrators(rig: GrpcRig, method: str, metadata: Any) -> None:
    assert (await refusal(rig, method, b"", metadata)).code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("metadata", [keyed(ADMIN), (("x-admin-key", ADMIN),)])
async def test_an_administrator_sees_the_clusters_state(rig: GrpcRig, metadata: Any) -> None:
    state = await rig.stub.GetClusterState(pb.GetClusterStateRequest(), metadata=metadata)
    assert len(state.workers) == 2


async def test_health_needs_no_key_and_reflection_does(rig: GrpcRig) -> None:
    health = health_pb2_grpc.HealthStub(rig.channel)
    assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
    stub = reflection_pb2_grpc.ServerReflectionStub(rig.channel)
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    answers = [answer async for answer in stub.ServerReflectionInfo(iter([asked]), metadata=keyed(ACME))]
    names = {service.name for service in answers[0].list_services_response.service}
    assert names == {SERVICE.full_name, "grpc.health.v1.Health", reflection.SERVICE_NAME}


async def test_a_limit_says_when_to_come_back() -> None:
    async with grpc_rig(always(ids("ok")), access=access(key_file(limits={"requests_per_minute": 1}))) as rig:
        call = rig.stub.Generate(REQUEST, metadata=keyed(ACME))
        assert len([response async for response in call]) > 0
        assert dict(await call.initial_metadata())["x-ratelimit-remaining-requests"] == "0"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.generate(REQUEST, metadata=keyed(ACME))
        details = details_of(caught.value)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert details["ErrorInfo"].reason == "QUOTA"
        assert details["RetryInfo"].retry_delay.seconds == 60
        assert await rig.generate(REQUEST, metadata=keyed(OTHER))


async def test_nobody_takes_finds_or_ends_a_request_of_another_tenant() -> None:
    service = ScriptedService(lambda request: [accepted(request), Pause()])
    request = pb.GenerateRequest(request_id="mine", prompt="x", stream=True)
    asked = pb.AbortRequest(request_ids=["mine", "acme/mine", "other/mine"])
    async with grpc_rig(service, access=access()) as rig:
        running = rig.stub.Generate(request, metadata=keyed(ACME))
        first = await running.read()
        assert first.request_id == "mine"
        twin = rig.stub.Generate(request, metadata=keyed(OTHER))  # the same id is free for everybody else
        await in_flight(rig.frontend, 2)
        twin.cancel()
        await in_flight(rig.frontend, 1)
        refused = await rig.stub.Abort(asked, metadata=keyed(OTHER))
        assert list(refused.aborted_request_ids) == []
        assert rig.frontend.in_flight.num_requests == 1
        done = await rig.stub.Abort(pb.AbortRequest(request_ids=["mine"]), metadata=keyed(ACME))
        assert list(done.aborted_request_ids) == ["mine"]
        await in_flight(rig.frontend, 0)


async def test_an_id_given_by_the_server_ends_its_request_too() -> None:
    service = ScriptedService(lambda request: [accepted(request), Pause()])
    async with grpc_rig(service, access=access()) as rig:
        running = rig.stub.Generate(pb.GenerateRequest(prompt="x", stream=True), metadata=keyed(ACME))
        request_id = (await running.read()).request_id
        other = await rig.stub.Abort(pb.AbortRequest(request_ids=[request_id]), metadata=keyed(OTHER))
        own = await rig.stub.Abort(pb.AbortRequest(request_ids=[request_id]), metadata=keyed(ACME))
        assert (list(other.aborted_request_ids), list(own.aborted_request_ids)) == ([], [request_id])
        await in_flight(rig.frontend, 0)


async def test_both_apis_give_a_tenant_one_salt_and_one_budget() -> None:
    gate = access(key_file(limits={"requests_per_minute": 3}))
    service = always(ids("ok"))
    async with grpc_rig(service, access=gate) as rig:
        await asyncio.gather(*(rig.generate(REQUEST, metadata=keyed(key)) for key in (ACME, ACME_OLD)))
        assert {request.cache_salt for request in service.submitted} == {key_file().cache_salt("acme")}
        assert gate.tenant([f"Bearer {ACME}".encode()]).headers()["x-ratelimit-remaining-requests"] == "1"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.generate(pb.GenerateRequest(prompt="x", cache_salt="acme"), metadata=keyed(ACME))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert details_of(caught.value)["BadRequest"].field_violations[0].field == "cache_salt"
