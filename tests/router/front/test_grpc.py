import asyncio
import socket
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from common.values.errors import Overloaded, WorkerFailed
from common.values.request import FinishReason
from common.wire.pb import generation_pb2 as pb
from router.core.generation import GenerationRequest
from router.front.grpc.gate import NEEDS
from router.front.grpc.server import SERVICE_NAME, GrpcServer
from router.front.ports import PortInUse
from router.front.service_protocol import Readiness
from tests.router.front.grpc_rig import details_of, finishes_of, grpc_rig, text_of
from tests.router.front.http_rig import build_frontend, http_rig, ids, in_flight, open_access
from tests.router.front.scripted_service import Pause, Script, ScriptedService, accepted, always, failing, tokens
from tests.router.text.tokenizers_for_tests import BOS_ID, IM_END_ID

HELLO = [*ids("Hé!"), IM_END_ID]


def hangs_after(token_ids: list[int]) -> ScriptedService:
    """Gives a few tokens and then nothing, until it is cancelled."""

    def script(request: GenerationRequest) -> Script:
        return [accepted(request), *tokens([token_ids] * request.num_choices, None), Pause()]

    return ScriptedService(script)


async def refusal(service: ScriptedService, request: pb.GenerateRequest) -> grpc.aio.AioRpcError:
    async with grpc_rig(service) as rig:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await rig.generate(request)
    return refused.value


async def test_the_clients_trace_goes_with_the_request() -> None:
    service = always(ids("ok"))
    trace_parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    async with grpc_rig(service) as rig:
        call = rig.stub.Generate(pb.GenerateRequest(prompt="x"), metadata=(("traceparent", trace_parent),))
        assert [response async for response in call]
    assert service.submitted[0].trace_parent == trace_parent


async def test_a_stream_is_accepted_then_tokens_then_finished() -> None:
    request = pb.GenerateRequest(request_id="mine", prompt="hi", stream=True)
    request.output.return_timings = True
    async with grpc_rig(always(HELLO, FinishReason.STOP)) as rig:
        call = rig.stub.Generate(request)
        responses = [response async for response in call]
        metadata = dict(await call.initial_metadata())
    kinds = [response.WhichOneof("event") for response in responses]
    assert kinds[0] == "accepted" and kinds[-1] == "finished" and set(kinds[1:-1]) == {"chunk"}
    assert responses[0].accepted.prefill_worker_id == "prefill-0"
    assert text_of(responses) == "Hé!"
    assert [token_id for response in responses for token_id in response.chunk.token_ids] == HELLO
    [finished] = finishes_of(responses)
    assert finished.reason == pb.FINISH_REASON_STOP
    assert (finished.usage.prompt_tokens, finished.usage.completion_tokens, finished.usage.cached_tokens) == (3, 5, 3)
    assert {response.request_id for response in responses} == {"mine"} == {metadata["x-request-id"]}
    timings = finished.timings
    exposed_s = timings.kv_transfer.ToTimedelta() - timings.kv_transfer_overlapped.ToTimedelta()
    parts = (timings.route, timings.prefill_queue, timings.prefill, timings.decode_queue, timings.decode)
    wall_s = sum(part.ToTimedelta().total_seconds() for part in parts) + exposed_s.total_seconds()
    assert wall_s == pytest.approx(0.142)


async def test_without_stream_there_is_one_chunk_per_choice() -> None:
    request = pb.GenerateRequest(prompt="hi", sampling=pb.SamplingParams(n=2), output=pb.OutputOptions(logprobs=1))
    async with grpc_rig(always(HELLO, FinishReason.STOP)) as rig:
        responses = await rig.generate(request)
    kinds = [response.WhichOneof("event") for response in responses]
    assert kinds == ["accepted", "chunk", "finished", "chunk", "finished"]
    assert text_of(responses, 0) == text_of(responses, 1) == "Hé!"
    entry = responses[1].chunk.logprobs[0]
    assert (entry.token, entry.logprob, len(entry.top)) == ("H", -0.5, 1)
    assert len(responses[1].chunk.logprobs) == len(HELLO)


async def test_both_apis_ask_for_the_same() -> None:
    """Floats arrive as float32 over gRPC; the workers must get the numbers that JSON carries."""
    service = always(HELLO, FinishReason.STOP)
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hi </s>"}]
    body: dict[str, Any] = {
        **{"model": "tiny", "messages": messages, "seed": -5, "temperature": 0.7, "top_p": 0.95, "top_k": 40, "n": 3},
        **{"min_p": 0.05, "presence_penalty": -0.3, "frequency_penalty": 1.1, "repetition_penalty": 1.02},
        **{"logit_bias": {"65": -1.7, "66": 3}, "max_tokens": 9, "min_tokens": 2, "stop": ["x", "y"]},
        **{"stop_token_ids": [70], "logprobs": True, "top_logprobs": 4, "priority": 5, "cache_salt": "s"},
    }
    same = ("seed", "temperature", "top_p", "top_k", "n", "min_p")
    penalties = ("presence_penalty", "frequency_penalty", "repetition_penalty")
    request = pb.GenerateRequest(
        model="tiny",
        chat=pb.ChatInput(messages=[pb.ChatMessage(**message) for message in messages], add_generation_prompt=True),
        sampling=pb.SamplingParams(logit_bias={65: -1.7, 66: 3}, **{name: body[name] for name in same + penalties}),
        stop=pb.StopConditions(max_tokens=9, min_tokens=2, stop=["x", "y"], stop_token_ids=[70]),
        output=pb.OutputOptions(logprobs=4),
        priority=5,
        cache_salt="s",
    )
    async with http_rig(service) as http, grpc_rig(service) as rig:
        reply = await http.post("/v1/chat/completions", body)
        assert reply.status_code == 200, reply.text
        await rig.generate(request)
    by_http, by_grpc = service.submitted
    assert by_http.sampling == by_grpc.sampling
    assert ids("system\nbe brief") == list(by_http.token_ids[2:17])
    assert (by_http.token_ids, by_http.num_choices) == (by_grpc.token_ids, by_grpc.num_choices)
    assert (by_http.priority, by_http.cache_salt) == (by_grpc.priority, by_grpc.cache_salt) == (5, b"s")


async def test_echo_and_token_ids_without_text() -> None:
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[BOS_ID, *ids("ab")]), stream=True)
    request.output.echo = True
    async with grpc_rig(always(ids("c"))) as rig:
        echoed = await rig.generate(request)
        request.output.echo = False
        request.output.return_text = False
        bare = await rig.generate(request)
    assert text_of(echoed) == "<s>abc"
    assert text_of(bare) == "" and list(bare[1].chunk.token_ids) == ids("c")


async def test_a_matched_stop_is_named() -> None:
    request = pb.GenerateRequest(prompt="x", stop=pb.StopConditions(stop=["END"]))
    by_id = pb.GenerateRequest(prompt="x", stop=pb.StopConditions(stop_token_ids=ids("q")))
    async with grpc_rig(always([*ids("one END"), *ids("two")])) as rig:
        [finished] = finishes_of(await rig.generate(request))
    async with grpc_rig(always(ids("q"), FinishReason.STOP)) as rig:
        [stopped] = finishes_of(await rig.generate(by_id))
    assert finished.stop_string == "END" and finished.usage.completion_tokens == len("one END")
    assert stopped.stop_token_id == ids("q")[0]


async def test_an_invalid_field_is_named_in_the_details() -> None:
    error = await refusal(
        always([1]), pb.GenerateRequest(prompt="x", sampling=pb.SamplingParams(temperature=float("nan")))
    )
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    details = details_of(error)
    assert (details["ErrorInfo"].domain, details["ErrorInfo"].reason) == ("pdserve", "INVALID_VALUE")
    assert [violation.field for violation in details["BadRequest"].field_violations] == ["sampling.temperature"]


UNSUPPORTED: list[tuple[str, Callable[[pb.GenerateRequest], object]]] = [
    ("session_id", lambda request: setattr(request, "session_id", "s")),
]


@pytest.mark.parametrize(("field", "change"), UNSUPPORTED, ids=[field for field, _ in UNSUPPORTED])
async def test_an_unsupported_field_is_refused_by_name(
    field: str, change: Callable[[pb.GenerateRequest], object]
) -> None:
    request = pb.GenerateRequest(prompt="x")
    change(request)
    error = await refusal(always([1]), request)
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert details_of(error)["ErrorInfo"].reason == "UNSUPPORTED_PARAMETER"
    assert details_of(error)["BadRequest"].field_violations[0].field == field


@pytest.mark.parametrize(
    "request_",
    [
        pb.GenerateRequest(),
        pb.GenerateRequest(prompt=""),
        pb.GenerateRequest(token_ids=pb.TokenIds()),
        pb.GenerateRequest(chat=pb.ChatInput()),
        pb.GenerateRequest(chat=pb.ChatInput(messages=[pb.ChatMessage(role="function", content="x")])),
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[300])),
        pb.GenerateRequest(prompt="x", request_id="a b"),
        pb.GenerateRequest(prompt="x", stop=pb.StopConditions(max_tokens=0)),
        pb.GenerateRequest(prompt="x", stop=pb.StopConditions(max_tokens=3, min_tokens=5)),
        pb.GenerateRequest(prompt="x", sampling=pb.SamplingParams(n=0)),
        pb.GenerateRequest(prompt="x", priority=-999),
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[7] * 512)),
    ],
)
async def test_bad_input_is_invalid_and_never_reaches_the_service(request_: pb.GenerateRequest) -> None:
    service = always([1])
    error = await refusal(service, request_)
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert details_of(error)["BadRequest"].field_violations
    assert service.submitted == []


async def test_an_unknown_model_is_not_found() -> None:
    error = await refusal(always([1]), pb.GenerateRequest(prompt="x", model="other"))
    assert error.code() == grpc.StatusCode.NOT_FOUND
    assert details_of(error)["ErrorInfo"].reason == "MODEL_NOT_FOUND"


async def test_a_full_queue_says_when_to_retry() -> None:
    error = await refusal(failing(Overloaded("queue full", retry_after_s=1.5)), pb.GenerateRequest(prompt="x"))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert details_of(error)["RetryInfo"].retry_delay == Duration(seconds=1, nanos=500_000_000)


async def test_a_lost_worker_is_aborted_before_output_and_internal_after() -> None:
    error = WorkerFailed("decode-0 was lost")
    before = await refusal(failing(error), pb.GenerateRequest(prompt="x", stream=True))
    after = await refusal(
        failing(error, lambda request: [accepted(request), *tokens([ids("ab")], None)]),
        pb.GenerateRequest(prompt="x", stream=True),
    )
    assert before.code() == grpc.StatusCode.ABORTED
    assert after.code() == grpc.StatusCode.INTERNAL
    assert details_of(after)["ErrorInfo"].reason == "WORKER_LOST"


async def test_the_text_of_an_exception_stays_inside(capfd: pytest.CaptureFixture[str]) -> None:
    def script(request: GenerationRequest) -> Script:
        raise RuntimeError("CANARY-9c1 prompt text")

    error = await refusal(ScriptedService(script), pb.GenerateRequest(prompt="CANARY-9c1"))
    assert error.code() == grpc.StatusCode.INTERNAL
    assert (error.details() or "").startswith("internal error ")
    captured = capfd.readouterr()
    assert "internal_error" in captured.out + captured.err
    assert "CANARY" not in f"{error.details()}{captured.out}{captured.err}"


@pytest.mark.parametrize("n", [1, 2])
async def test_a_cancelled_stream_is_cancelled_in_the_service_once(n: int) -> None:
    service = hangs_after(ids("abc"))
    async with grpc_rig(service) as rig:
        call = rig.stub.Generate(pb.GenerateRequest(prompt="x", stream=True, sampling=pb.SamplingParams(n=n)))
        for _ in range(1 + 3 * n):
            await call.read()
        call.cancel()
        await in_flight(rig.frontend, 0)
    assert service.cancelled == [service.submitted[0].request_id]


async def test_a_closed_channel_cancels_a_request_that_waits() -> None:
    service = ScriptedService(lambda _: [Pause()])
    async with grpc_rig(service) as rig:
        async with grpc.aio.insecure_channel(rig.address) as channel:
            stub = type(rig.stub)(channel)
            call = stub.Generate(pb.GenerateRequest(prompt="x"))
            reading = asyncio.ensure_future(call.read())
            await in_flight(rig.frontend, 1)
        await in_flight(rig.frontend, 0)
        with pytest.raises((asyncio.CancelledError, grpc.aio.AioRpcError)):
            await reading
    assert len(service.cancelled) == 1


async def test_the_clients_deadline_goes_to_the_service() -> None:
    service = ScriptedService(lambda _: [Pause()])
    async with grpc_rig(service) as rig:
        waiting = asyncio.ensure_future(rig.generate(pb.GenerateRequest(prompt="x"), timeout=8.0))
        await in_flight(rig.frontend, 1)
        waiting.cancel()
        await in_flight(rig.frontend, 0)
    assert 0 < service.submitted[0].deadline_s <= 8.01  # on the wire it is rounded up to 10 ms
    assert len(service.cancelled) == 1


async def test_a_request_past_the_clients_deadline_is_given_up() -> None:
    service = ScriptedService(lambda _: [Pause()])
    async with grpc_rig(service) as rig:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await rig.generate(pb.GenerateRequest(prompt="x"), timeout=0.3)
        await in_flight(rig.frontend, 0)
    assert refused.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert len(service.cancelled) == len(service.submitted) <= 1


async def test_without_a_deadline_the_servers_default_holds() -> None:
    service = always(HELLO, FinishReason.STOP)
    async with grpc_rig(service) as rig:
        await rig.generate(pb.GenerateRequest(prompt="x"))
    assert service.submitted[0].deadline_s == 10.0


async def test_abort_ends_a_stream_with_what_it_has() -> None:
    service = hangs_after(ids("ab E"))
    async with grpc_rig(service) as rig:
        request = pb.GenerateRequest(request_id="r1", prompt="x", stream=True, stop=pb.StopConditions(stop=["END"]))
        reading = asyncio.ensure_future(rig.generate(request))
        await in_flight(rig.frontend, 1)
        aborted = await rig.stub.Abort(pb.AbortRequest(request_ids=["r1", "unknown"]))
        responses = await reading
    assert list(aborted.aborted_request_ids) == ["r1"]
    [finished] = finishes_of(responses)
    assert finished.reason == pb.FINISH_REASON_ABORT
    assert finished.usage.completion_tokens == len([t for r in responses for t in r.chunk.token_ids])


async def test_a_request_id_in_use_is_refused() -> None:
    service = hangs_after(ids("a"))
    async with grpc_rig(service) as rig:
        call = rig.stub.Generate(pb.GenerateRequest(request_id="same", prompt="x"))
        await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await rig.generate(pb.GenerateRequest(request_id="same", prompt="y"))
        assert rig.frontend.in_flight.num_requests == 1
        call.cancel()
        await in_flight(rig.frontend, 0)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert service.cancelled == ["same"]


async def test_a_message_beyond_the_limit_is_an_invalid_argument() -> None:
    async with grpc_rig(always([1]), max_request_bytes=1000) as rig:
        with pytest.raises(grpc.aio.AioRpcError) as over:
            await rig.generate(pb.GenerateRequest(prompt="x" * 1000))
        with pytest.raises(grpc.aio.AioRpcError) as far_over:
            await rig.generate(pb.GenerateRequest(prompt="x" * 5000))
    assert over.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "at most 1000" in (over.value.details() or "")
    assert far_over.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_tokenize_and_detokenize() -> None:
    async with grpc_rig(always([1])) as rig:
        tokens_ = await rig.stub.Tokenize(pb.TokenizeRequest(prompt="hé"))
        plain = await rig.stub.Tokenize(pb.TokenizeRequest(prompt="hé", add_special_tokens=False))
        text = await rig.stub.Detokenize(pb.DetokenizeRequest(token_ids=tokens_.token_ids))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await rig.stub.Detokenize(pb.DetokenizeRequest(token_ids=[300]))
    assert list(tokens_.token_ids) == [BOS_ID, *plain.token_ids] and tokens_.max_model_len == 512
    assert text.prompt == "<s>hé"
    assert details_of(refused.value)["BadRequest"].field_violations[0].field == "token_ids"


async def test_model_and_cluster_state() -> None:
    async with grpc_rig(always([1])) as rig:
        info = await rig.stub.GetModelInfo(pb.GetModelInfoRequest())
        state = await rig.stub.GetClusterState(pb.GetClusterStateRequest())
        watch = rig.stub.WatchClusterState(pb.WatchClusterStateRequest(interval=Duration(nanos=100_000_000)))
        seen = [await watch.read() for _ in range(2)]
        watch.cancel()
    assert (info.model, info.vocab_size, info.block_size, info.kv_dtype) == ("tiny", 300, 16, "float32")
    prefill, decode = state.workers
    assert (prefill.role, decode.role) == (pb.ROLE_PREFILL, pb.ROLE_DECODE)
    counted = decode.kv_blocks_used + decode.kv_blocks_cached + decode.kv_blocks_free + decode.kv_blocks_held
    assert counted == decode.kv_blocks_total
    assert all(response.workers == state.workers for response in seen)


async def test_health_is_liveness_and_readiness() -> None:
    service = always([1])
    async with grpc_rig(service) as rig:
        health = health_pb2_grpc.HealthStub(rig.channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
        first = (await watch.read()).status
        service.ready = Readiness(is_ready=False, reasons=("no decode worker is ready",))
        changed = (await watch.read()).status
        live = (await health.Check(health_pb2.HealthCheckRequest())).status
        ready = (await health.Check(health_pb2.HealthCheckRequest(service=SERVICE_NAME))).status
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await health.Check(health_pb2.HealthCheckRequest(service="other"))
        watch.cancel()
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    assert (first, changed, live, ready) == (serving, not_serving, serving, not_serving)
    assert unknown.value.code() == grpc.StatusCode.NOT_FOUND


async def test_reflection_lists_the_services() -> None:
    async with grpc_rig(always([1])) as rig:
        stub = reflection_pb2_grpc.ServerReflectionStub(rig.channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        response = await call.read()
    names = {service.name for service in response.list_services_response.service}
    assert {SERVICE_NAME, "grpc.health.v1.Health"} <= names


async def test_a_port_in_use_is_said_clearly() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(PortInUse, match="--grpc-port"):
            GrpcServer(build_frontend(always([1])), 1000, address, open_access())


@pytest.mark.parametrize("method", sorted(NEEDS))
async def test_a_message_that_cannot_be_decoded_is_an_invalid_argument_on_every_method(method: str) -> None:
    async with grpc_rig(always(ids("ok"))) as rig:
        call = rig.channel.stream_stream(method)()
        await call.write(b"\xff\xff\xff")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await asyncio.wait_for(call.read(), 60)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert refused.value.details() == "the message cannot be decoded"
        assert await rig.generate(pb.GenerateRequest(prompt="x"))
