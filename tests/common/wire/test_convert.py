"""Every router <-> worker message survives the wire; what is no message of ours is a PeerError."""

import asyncio
import dataclasses
import typing

import pytest

from common.values.errors import PeerError
from common.values.ids import AttemptId, RequestId, RouterId, WorkerRef
from common.values.messages import (
    AttemptFailed,
    AttemptTokens,
    Cancel,
    Drain,
    FirstTokens,
    Granted,
    HandoffReport,
    Prefill,
    PromptScored,
    RankProcess,
    Refused,
    Reserve,
    Role,
    RouterHello,
    RouterMessage,
    TokenBatch,
    TransferFailed,
    WorkerInfo,
    WorkerMessage,
    WorkerState,
    WorkerStats,
)
from common.values.request import (
    Adapter,
    ChunkTiming,
    EarlyStopping,
    Fingerprint,
    FinishReason,
    KvChunkTiming,
    PromptLogprobs,
    SampledToken,
    SamplingParams,
    TokenEvent,
    Work,
)
from common.wire import convert as pb_convert
from common.wire.pb import worker_pb2 as pb

ATTEMPT = AttemptId(RequestId("req-1"), 3)
# Every field differs from its protobuf default, so a forgotten field shows.
SAMPLING = SamplingParams(
    seed=2**64 - 1,
    max_tokens=17,
    temperature=0.7,
    top_k=5,
    top_p=0.9,
    min_p=0.05,
    presence_penalty=-1.5,
    frequency_penalty=0.25,
    repetition_penalty=1.1,
    logit_bias=((3, -100.0), (9, 2.5)),
    allowed_token_ids=(1, 2, 3),
    num_logprobs=4,
    min_tokens=2,
    stop_token_ids=(7, 8),
    bad_words=((3,), (4, 70_000)),
    grammar="start: /x/",
    num_beams=4,
    length_penalty=0.5,
    early_stopping=EarlyStopping.NEVER,
)
WORK = Work(
    attempt_id=ATTEMPT,
    token_ids=(1, 2, 3, 49151),
    num_prompt_tokens=3,
    sampling=SAMPLING,
    choices=(0, 2),
    priority=-5,
    cache_salt=b"\x00tenant",
    deadline_s=12.5,
    tenant="acme",
    num_prompt_logprobs=3,
    adapter=Adapter("0a1b", "/adapters/a"),
)
KV_CHUNK = KvChunkTiming(0.25, 0, 4, 64)
TOKENS = (
    TokenEvent(0, 4, SampledToken(11, -0.5, ((11, -0.5), (12, -1.25)))),
    TokenEvent(2, 0, SampledToken(0, 0.0), FinishReason.STOP),
    TokenEvent(1, 1, SampledToken(5), FinishReason.LENGTH),
)
ROUTER_MESSAGES: list[RouterMessage] = [
    RouterHello(RouterId("router-0")),
    Reserve(WORK, 64),
    Prefill(WORK, 2, WorkerRef("decode-0", "abc"), "127.0.0.1:9", 48),
    Cancel(ATTEMPT, (0, 1)),
    Drain(2.5),
]
WORKER_MESSAGES: list[WorkerMessage] = [
    WorkerInfo(
        ref=WorkerRef("prefill-0", "i1"),
        role=Role.DECODE,
        model_name="tiny",
        block_size=16,
        num_blocks=32,
        max_model_len=512,
        max_num_seqs=8,
        pid=4242,
        fingerprint=Fingerprint((("dtype", "float32"), ("model", "abc"))),
        handoff_address="127.0.0.1:1234",
        device="cuda:0",
        ranks=(RankProcess(4242, "cuda:0"), RankProcess(4243, "cuda:1")),
    ),
    Granted(ATTEMPT, 48, is_local=True),
    Refused(ATTEMPT, "too long", is_retryable=True, prefill_try=7),
    PromptScored(ATTEMPT, PromptLogprobs(7, (-0.5, -2.25), (1, 70_000), (5, 9), (-0.5, -0.125)), 2),
    FirstTokens(ATTEMPT, 1, TOKENS, 0.25, 0.5, 32, (ChunkTiming(0.1, 0.2, 64), ChunkTiming(0.2, 0.3, 5))),
    TokenBatch((AttemptTokens(ATTEMPT, TOKENS, 9, 4), AttemptTokens(AttemptId(RequestId("b"), 0), TOKENS[:1]))),
    HandoffReport(
        ATTEMPT,
        2**40,
        30,
        0.5,
        0.125,
        0.25,
        16,
        is_local=True,
        local_prefill_s=0.75,
        chunks=(KV_CHUNK,),
        transport="shm",
        link_bytes_per_s=2.5e9,
    ),
    TransferFailed(ATTEMPT, 2, "link lost"),
    AttemptFailed(ATTEMPT, "step failed", is_retryable=True, prefill_try=1),
    WorkerStats(WorkerState.DRAINING, 1, 2, 300, 4, 5, 6, 7, 1234.5, 0.0125, 8, 9, (0.0, 1.5)),
]


@pytest.mark.parametrize("message", ROUTER_MESSAGES, ids=lambda message: type(message).__name__)
def test_router_message_survives_the_wire(message: RouterMessage) -> None:
    encoded = pb_convert.router_message_to_pb(message).SerializeToString()
    assert pb_convert.router_message_from_pb(pb.ConnectRequest.FromString(encoded)) == message


@pytest.mark.parametrize("message", WORKER_MESSAGES, ids=lambda message: type(message).__name__)
def test_worker_message_survives_the_wire(message: WorkerMessage) -> None:
    encoded = pb_convert.worker_message_to_pb(message).SerializeToString()
    assert pb_convert.worker_message_from_pb(pb.ConnectResponse.FromString(encoded)) == message


def test_every_kind_of_message_is_tried() -> None:
    assert {type(message) for message in ROUTER_MESSAGES} == set(typing.get_args(RouterMessage))
    assert {type(message) for message in WORKER_MESSAGES} == set(typing.get_args(WorkerMessage))


def test_every_field_tried_differs_from_the_wire_default() -> None:
    for value in (SAMPLING, WORK, *ROUTER_MESSAGES, *WORKER_MESSAGES):
        for field in dataclasses.fields(value):
            assert getattr(value, field.name) not in (0, "", b"", (), False), f"{type(value).__name__}.{field.name}"


def test_absent_and_zero_logprobs_stay_apart() -> None:
    for num_logprobs in (None, 0):
        work = dataclasses.replace(WORK, sampling=dataclasses.replace(SAMPLING, num_logprobs=num_logprobs))
        assert pb_convert.router_message_from_pb(pb_convert.router_message_to_pb(Reserve(work))) == Reserve(work)


def test_absent_and_first_prefill_try_stay_apart() -> None:
    for prefill_try in (None, 0):
        for kind in (Refused, AttemptFailed):
            message = kind(ATTEMPT, "busy", is_retryable=True, prefill_try=prefill_try)
            assert pb_convert.worker_message_from_pb(pb_convert.worker_message_to_pb(message)) == message


def test_message_of_no_known_kind_is_the_peers_error() -> None:
    with pytest.raises(PeerError):
        pb_convert.router_message_from_pb(pb.ConnectRequest())
    with pytest.raises(PeerError):
        pb_convert.worker_message_from_pb(pb.ConnectResponse())


def test_unknown_state_is_the_peers_error() -> None:
    with pytest.raises(PeerError, match="dancing"):
        pb_convert.worker_message_from_pb(pb.ConnectResponse(stats=pb.WorkerStats(state="dancing")))


def test_batches_keep_their_messages_in_order() -> None:
    for messages in (ROUTER_MESSAGES[:1], ROUTER_MESSAGES):
        encoded = pb_convert.router_messages_to_pb(messages).SerializeToString()
        assert pb_convert.router_messages_from_pb(pb.ConnectRequest.FromString(encoded)) == messages
    for answers in (WORKER_MESSAGES[:1], WORKER_MESSAGES):
        encoded = pb_convert.worker_messages_to_pb(answers).SerializeToString()
        assert pb_convert.worker_messages_from_pb(pb.ConnectResponse.FromString(encoded)) == answers


def test_a_batch_within_a_batch_is_refused() -> None:
    inner = pb_convert.router_messages_to_pb(ROUTER_MESSAGES)
    with pytest.raises(PeerError, match="no known kind"):
        pb_convert.router_messages_from_pb(pb.ConnectRequest(batch=pb.RouterMessages(messages=[inner])))
    answer = pb_convert.worker_messages_to_pb(WORKER_MESSAGES)
    with pytest.raises(PeerError, match="no known kind"):
        pb_convert.worker_messages_from_pb(pb.ConnectResponse(batch=pb.WorkerMessages(messages=[answer])))


def test_token_ids_that_are_no_whole_numbers_are_refused() -> None:
    request = pb_convert.router_message_to_pb(Reserve(WORK, 0))
    request.reserve.work.token_ids = request.reserve.work.token_ids[:-1]
    with pytest.raises(PeerError, match="4 bytes each"):
        pb_convert.router_message_from_pb(request)


async def test_what_a_turn_brings_after_the_first_travels_with_it() -> None:
    """One task wakes the writer, another queues behind its back before it writes."""
    queue: asyncio.Queue[int] = asyncio.Queue()
    taking = asyncio.ensure_future(pb_convert.take_batch(queue))
    await asyncio.sleep(0)
    queue.put_nowait(1)
    asyncio.get_running_loop().call_soon(queue.put_nowait, 2)
    assert await taking == [1, 2]


async def test_a_batch_is_bounded_and_the_rest_comes_next_in_order() -> None:
    queue: asyncio.Queue[int] = asyncio.Queue()
    for number in range(pb_convert.MAX_BATCHED + 2):
        queue.put_nowait(number)
    assert await pb_convert.take_batch(queue) == [*range(pb_convert.MAX_BATCHED)]
    assert await pb_convert.take_batch(queue) == [pb_convert.MAX_BATCHED, pb_convert.MAX_BATCHED + 1]
