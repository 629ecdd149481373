"""`best_of`: which choices a client gets, in which order, and what it is told of the others; over both APIs."""

from typing import Any

import grpc
import pytest

from common.values.request import FinishReason, SampledToken, TokenEvent
from common.wire.pb import generation_pb2 as pb
from router.core.generation import Finished, GenerationEvent, GenerationRequest, Tokens
from tests.router.front.grpc_rig import details_of, grpc_rig
from tests.router.front.http_rig import http_rig, ids
from tests.router.front.scripted_service import TIMINGS, ScriptedService, accepted

# Text and logprobs of each choice: the second is best by the mean, the fourth by the sum.
CHOICES = (("aa", (-2.0, -2.0)), ("bbbb", (-0.5,) * 4), ("ccc", (-1.0,) * 3), ("d", (-1.5,)))
NUM_TOKENS = sum(len(text) for text, _ in CHOICES)
BODY: dict[str, Any] = {"prompt": "x", "n": 2, "best_of": 4}


def choosing() -> ScriptedService:
    def script(request: GenerationRequest) -> list[GenerationEvent]:
        steps = [Tokens(_step(position)) for position in range(4)]
        return [accepted(request), *steps, Finished(len(request.token_ids), NUM_TOKENS, 0, TIMINGS)]

    return ScriptedService(script)


def _step(position: int) -> tuple[TokenEvent, ...]:
    return tuple(
        TokenEvent(
            idx,
            position,
            SampledToken(ids(text)[position], logprobs[position]),
            FinishReason.LENGTH if position == len(text) - 1 else None,
        )
        for idx, (text, logprobs) in enumerate(CHOICES)
        if position < len(text)
    )


async def test_the_best_by_mean_logprob_are_returned_best_first_and_all_are_counted() -> None:
    service = choosing()
    async with http_rig(service) as rig:
        reply = (await rig.post("/v1/completions", BODY)).json()
    assert [(choice["index"], choice["text"]) for choice in reply["choices"]] == [(0, "bbbb"), (1, "ccc")]
    assert [choice["logprobs"] for choice in reply["choices"]] == [None, None]
    assert reply["usage"]["completion_tokens"] == NUM_TOKENS
    [request] = service.submitted
    assert (request.num_choices, request.sampling.num_logprobs) == (4, 0)


async def test_a_chat_and_several_prompts_are_answered_with_their_best() -> None:
    async with http_rig(choosing()) as rig:
        chat = await rig.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "best_of": 4})
        both = (await rig.post("/v1/completions", {**BODY, "prompt": ["x", "y"], "logprobs": 0})).json()
    assert [choice["message"]["content"] for choice in chat.json()["choices"]] == ["bbbb"]
    assert [choice["text"] for choice in both["choices"]] == ["bbbb", "ccc"] * 2
    assert both["choices"][1]["logprobs"]["token_logprobs"] == [-1.0] * 3


async def test_as_many_as_are_generated_come_best_first() -> None:
    async with http_rig(choosing()) as rig:
        reply = (await rig.post("/v1/completions", {**BODY, "n": 4})).json()
    assert [choice["text"] for choice in reply["choices"]] == ["bbbb", "ccc", "d", "aa"]


async def test_a_grpc_call_has_the_best_and_the_tokens_of_the_others() -> None:
    async with grpc_rig(choosing()) as rig:
        request = pb.GenerateRequest(prompt="x", sampling=pb.SamplingParams(n=2, best_of=4))
        responses = await rig.generate(request)
    chunks = [response.chunk for response in responses if response.HasField("chunk")]
    assert [(chunk.index, chunk.text, len(chunk.logprobs)) for chunk in chunks] == [(0, "bbbb", 0), (1, "ccc", 0)]
    usages = [response.finished.usage for response in responses if response.HasField("finished")]
    assert [(usage.completion_tokens, usage.discarded_tokens) for usage in usages] == [(4, 3), (3, 3)]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"stream": True}, "best_of is not available with stream"),
        ({"best_of": 1}, "best_of must be between 2 and 8"),
        ({"best_of": 9}, "best_of must be between 2 and 8"),
    ],
    ids=str,
)
async def test_what_does_not_go_with_it_is_refused_by_name(fields: dict[str, Any], words: str) -> None:
    async with http_rig(choosing()) as rig:
        reply = await rig.post("/v1/completions", {**BODY, **fields})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "best_of")
    assert words in reply.json()["error"]["message"]


async def test_a_streamed_grpc_call_is_refused_by_name() -> None:
    async with grpc_rig(choosing()) as rig:
        request = pb.GenerateRequest(prompt="x", sampling=pb.SamplingParams(n=2, best_of=4), stream=True)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await rig.generate(request)
    assert details_of(refused.value)["BadRequest"].field_violations[0].field == "sampling.best_of"
