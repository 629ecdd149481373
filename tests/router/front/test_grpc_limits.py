"""Limits of a gRPC connection: what a stranger may send before and beside a message."""

import asyncio
import contextlib
from functools import partial

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from common.wire.pb import generation_pb2 as pb
from router.front.grpc import requests as grpc_requests
from router.request import limits
from tests.router.front.grpc_rig import details_of, grpc_rig
from tests.router.front.http_rig import ids, in_flight
from tests.router.front.scripted_service import Pause, ScriptedService, accepted, always
from tests.waiting import until

REQUEST = pb.GenerateRequest(prompt="x")


async def test_metadata_has_the_size_of_an_http_head() -> None:
    service = always(ids("ok"))
    async with grpc_rig(service) as rig:
        assert await rig.generate(REQUEST, metadata=(("x-large", "y" * (limits.MAX_HEADER_BYTES - 2000)),))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.generate(REQUEST, metadata=(("x-large", "y" * limits.MAX_HEADER_BYTES),))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await rig.generate(REQUEST)
    assert len(service.submitted) == 2


async def test_further_calls_of_a_connection_wait_in_the_client() -> None:
    service = ScriptedService(lambda request: [accepted(request), Pause()])
    async with grpc_rig(service) as rig:
        calls = [rig.stub.Generate(REQUEST) for _ in range(limits.MAX_GRPC_STREAMS + 5)]
        reading = [asyncio.ensure_future(call.read()) for call in calls]
        await in_flight(rig.frontend, limits.MAX_GRPC_STREAMS)
        assert sum(task.done() for task in reading) <= limits.MAX_GRPC_STREAMS
        calls[0].cancel()

        await in_flight(rig.frontend, limits.MAX_GRPC_STREAMS)
        assert len(service.submitted) <= limits.MAX_GRPC_STREAMS + 1
        for call in calls:
            call.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        await in_flight(rig.frontend, 0)


async def test_strangers_watch_the_health_in_bounded_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_HEALTH_WATCHERS", 2)
    request = health_pb2.HealthCheckRequest()
    async with grpc_rig(always(ids("ok"))) as rig:
        health = health_pb2_grpc.HealthStub(rig.channel)
        watches = [health.Watch(request) for _ in range(2)]
        for watch in watches:
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health.Watch(request).read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        watches[0].cancel()

        async def has_room() -> bool:
            with contextlib.suppress(grpc.aio.AioRpcError):
                return (await health.Watch(request).read()) is not None
            return False

        await until(has_room)


async def test_a_connection_that_never_says_anything_is_closed() -> None:
    async with grpc_rig(always(ids("ok"))) as rig:
        host, _, port = rig.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(20 * limits.HANDSHAKE_TIMEOUT_S):
            while await reader.read(4096):
                pass  # the server's settings, and then the end
        writer.close()


async def test_too_many_biases_are_refused_before_any_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[float] = []

    def noted(value: float) -> float:
        read.append(value)
        return value

    monkeypatch.setattr(grpc_requests, "_shortest", noted)
    at_most, too_many = (
        pb.GenerateRequest(prompt="x", sampling=pb.SamplingParams(logit_bias=dict.fromkeys(range(number), 1.0)))
        for number in (limits.MAX_LOGIT_BIAS, limits.MAX_LOGIT_BIAS + 1)
    )
    async with grpc_rig(always(ids("ok"))) as rig:
        assert await rig.generate(at_most)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.generate(too_many)
    violations = details_of(caught.value)["BadRequest"].field_violations
    assert [violation.field for violation in violations] == ["sampling.logit_bias"]
    assert len(read) == limits.MAX_LOGIT_BIAS


async def test_connections_are_bounded_and_their_places_come_back() -> None:
    own_connection = [("grpc.use_local_subchannel_pool", 1), ("grpc.initial_reconnect_backoff_ms", 100)]
    async with grpc_rig(always(ids("ok")), max_connections=2) as rig, contextlib.AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(grpc.aio.insecure_channel(rig.address, options=own_connection))
            for _ in range(3)
        ]

        async def is_served(channel: grpc.aio.Channel) -> bool:
            request = health_pb2.HealthCheckRequest()
            try:
                return await health_pb2_grpc.HealthStub(channel).Check(request) is not None
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.UNAVAILABLE
                return False

        assert [await is_served(channel) for channel in channels] == [True, True, False]
        await channels[0].close()
        await until(partial(is_served, channels[2]))
        assert await is_served(channels[1])


async def test_a_connection_without_calls_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "GRPC_IDLE_TIMEOUT_S", 0.1)
    async with grpc_rig(always(ids("ok"))) as rig:
        assert await rig.generate(REQUEST)

        async def is_idle() -> bool:
            return rig.channel.get_state() is grpc.ChannelConnectivity.IDLE

        await until(is_idle)
        assert await rig.generate(REQUEST)  # over a new one


@pytest.mark.parametrize("is_ended", [False, True], ids=["silent", "ended"])
async def test_a_call_whose_message_does_not_come_ends(monkeypatch: pytest.MonkeyPatch, is_ended: bool) -> None:
    """With a message it is answered, as any call that says on the wire no more than its method's name."""
    if not is_ended:
        monkeypatch.setattr(limits, "BODY_TIMEOUT_S", 0.1)
    path = "/pdserve.v1.GenerationService/Tokenize"
    async with grpc_rig(always(ids("ok"))) as rig:
        method = rig.channel.stream_stream(path, pb.TokenizeRequest.SerializeToString, pb.TokenizeResponse.FromString)
        call = method()
        if is_ended:
            await call.done_writing()
        expected = grpc.StatusCode.INVALID_ARGUMENT if is_ended else grpc.StatusCode.DEADLINE_EXCEEDED
        assert await call.code() is expected
        monkeypatch.undo()
        spoken = method()
        await spoken.write(pb.TokenizeRequest(prompt="x"))
        assert (await spoken.read()).token_ids


async def test_a_stream_of_messages_that_pauses_for_too_long_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async with grpc_rig(always(ids("ok"))) as rig:
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        call = reflection_pb2_grpc.ServerReflectionStub(rig.channel).ServerReflectionInfo()
        await call.write(asked)
        assert (await call.read()).list_services_response.service
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.OK
        monkeypatch.setattr(limits, "BODY_TIMEOUT_S", 0.1)
        silent = reflection_pb2_grpc.ServerReflectionStub(rig.channel).ServerReflectionInfo()
        assert await silent.code() is grpc.StatusCode.DEADLINE_EXCEEDED
