"""Tool calls and reasoning over gRPC: as over HTTP, in messages of the wire."""

import json
from dataclasses import replace
from typing import Any

import grpc
import pytest

from common.values.request import FinishReason
from common.wire.pb import generation_pb2 as pb
from router.request.dialect import Dialect
from tests.router.front.grpc_rig import finishes_of, grpc_rig, text_of
from tests.router.front.http_rig import MODEL, ids
from tests.router.front.scripted_service import always
from tests.router.text.tokenizers_for_tests import EOS_ID

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
THINKING = replace(MODEL, max_model_len=2048, dialect=Dialect(reasoning="think"))
TOOLS = json.dumps([{"type": "function", "function": {"name": "weather", "parameters": {"properties": {}}}}])


def asking(*messages: pb.ChatMessage, stream: bool = False, **chat: Any) -> pb.GenerateRequest:
    stated = {"tools_json": TOOLS, "add_generation_prompt": True} | chat
    told = messages or (pb.ChatMessage(role="user", content="How warm is it?"),)
    return pb.GenerateRequest(chat=pb.ChatInput(messages=told, **stated), stream=stream)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_thought_text_and_a_call_are_told_apart(stream: bool) -> None:
    async with grpc_rig(
        always([*ids(f"<think>Hm.</think>I look.\n{CALL}"), EOS_ID], FinishReason.STOP), model=THINKING
    ) as rig:
        responses = await rig.generate(asking(stream=stream))
    chunks = [response.chunk for response in responses if response.HasField("chunk")]
    calls = [call for chunk in chunks for call in chunk.tool_calls]
    assert (text_of(responses), "".join(chunk.reasoning for chunk in chunks)) == ("I look.", "Hm.")
    assert [(call.name, call.id[:5]) for call in calls if call.name] == [("weather", "call_")]
    assert json.loads("".join(call.arguments for call in calls)) == {"city": "Rome"}
    assert (len(calls) > 1) == stream
    assert [finish.reason for finish in finishes_of(responses)] == [pb.FINISH_REASON_TOOL_CALLS]


async def test_calls_and_results_of_a_conversation_reach_the_model() -> None:
    service = always([*ids("Warm."), EOS_ID], FinishReason.STOP)
    call = pb.ToolCall(id="c", name="weather", arguments='{"city": "Rome"}')
    messages = (
        pb.ChatMessage(role="user", content="How warm is it?"),
        pb.ChatMessage(role="assistant", tool_calls=[call]),
        pb.ChatMessage(role="tool", content="30", tool_call_id="c"),
    )
    async with grpc_rig(service, model=THINKING) as rig:
        responses = await rig.generate(asking(*messages))
        prompt = rig.frontend.tokenizer.decode(service.submitted[0].token_ids)
    assert text_of(responses) == "Warm."
    assert [finish.reason for finish in finishes_of(responses)] == [pb.FINISH_REASON_STOP]
    assert CALL in prompt and "<tool_response>\n30\n</tool_response>" in prompt


@pytest.mark.parametrize(
    ("choice", "is_guided"),
    [("", False), ("auto", False), ("none", False), ("required", True),
     ('{"type": "function", "function": {"name": "weather"}}', True)],
)  # fmt: skip
async def test_a_call_that_must_be_made_is_guided(choice: str, is_guided: bool) -> None:
    service = always([*ids("x"), EOS_ID], FinishReason.STOP)
    async with grpc_rig(service) as rig:
        await rig.generate(asking(tool_choice=choice))
    assert bool(service.submitted[0].sampling.grammar) == is_guided


async def test_a_call_is_guided_though_no_text_is_wanted() -> None:
    service = always([*ids(CALL), EOS_ID], FinishReason.STOP)
    request = asking(tool_choice="required")
    request.output.return_text = False
    async with grpc_rig(service) as rig:
        responses = await rig.generate(request)
    assert service.submitted[0].sampling.grammar and text_of(responses) == ""


@pytest.mark.parametrize(
    ("chat", "field"),
    [
        ({"tools_json": "["}, "chat.tools_json"),
        ({"tools_json": "{}"}, "chat.tools_json"),
        ({"tool_choice": "any"}, "chat.tool_choice"),
        ({"tool_choice": '{"type": "function", "function": {"name": "x"}}'}, "chat.tool_choice"),
        ({"reasoning_effort": "much"}, "chat.reasoning_effort"),
    ],
)
async def test_what_cannot_be_done_names_its_field(chat: dict[str, str], field: str) -> None:
    service = always([1])
    async with grpc_rig(service) as rig:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await rig.generate(asking(**chat))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field in (refused.value.details() or "")
    assert service.submitted == []
