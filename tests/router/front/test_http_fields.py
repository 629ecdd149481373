"""Fields that clients send because they always do: ignored where they change no answer, refused by name elsewhere."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from router.front.openai.fields import NEUTRAL, NotOffered, fields_of
from router.front.openai.requests import ChatBody, CompletionBody
from tests.router.front.http_rig import HttpRig, http_rig, ids
from tests.router.front.scripted_service import always

pytestmark = pytest.mark.asyncio(loop_scope="module")
USER = [{"role": "user", "content": "x"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig() -> AsyncIterator[HttpRig]:
    async with http_rig(always(ids("ok"))) as rig:
        yield rig


async def refusal(rig: HttpRig, body: dict[str, Any], path: str = CHAT) -> dict[str, Any]:
    reply = await rig.post(path, body)
    assert reply.status_code == 400
    error: dict[str, Any] = reply.json()["error"]
    return error


@pytest.mark.parametrize(
    "extra",
    [
        {"prompt_cache_key": "k", "prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "auto"}},
        {"safety_identifier": "s", "user": "u", "metadata": {"run": "7"}},
        {"prediction": {"type": "content", "content": "x"}},
        {"store": False, "service_tier": "auto"},
        {"service_tier": "default", "parallel_tool_calls": True, "verbosity": "medium"},
        {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "best_of": 1},
        {"top_logprobs": 0, "echo": False, "add_special_tokens": False},
        {"stream": False, "stream_options": {}},
        {"stream_options": {"include_usage": False, "include_obfuscation": None}},
    ],
    ids=str,
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_what_changes_no_answer_is_accepted_and_changes_none(
    rig: HttpRig, path: str, extra: dict[str, Any]
) -> None:
    prompt: dict[str, Any] = {"messages": USER} if path == CHAT else {"prompt": "x"}
    fields = ChatBody.__struct_fields__ if path == CHAT else CompletionBody.__struct_fields__
    reply = await rig.post(path, {**prompt, **{name: value for name, value in extra.items() if name in fields}})
    assert reply.status_code == 200, reply.text
    plain = await rig.post(path, prompt)
    assert reply.json()["choices"] == plain.json()["choices"]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]},
        {"role": "user", "content": "x", "id": "msg_1", "cache_control": {"type": "ephemeral"}},
        {"role": "assistant", "content": "x", "refusal": None, "annotations": [], "tool_calls": [], "audio": None},
        {"role": "assistant", "content": "x", "reasoning_content": "thought"},
        {"role": "assistant", "content": "x", "reasoning": "thought", "function_call": None},
        {"role": "assistant", "content": None, "reasoning": "cut off", "reasoning_content": "cut off"},
        {"role": "user", "content": [{"type": "text", "text": "x", "annotations": []}]},
        {"role": "tool", "content": "4", "tool_call_id": "c"},
    ],
    ids=str,
)
async def test_messages_may_carry_what_clients_keep_with_them(rig: HttpRig, message: dict[str, Any]) -> None:
    assert (await rig.post(CHAT, {"messages": [message]})).status_code == 200


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"mm_processor_kwargs": None, "kv_transfer_params": None, "0": None, "a `b` - at `$.c`": None}, ""),
        ({"messages": [{"role": "user", "content": "x", "a": None}, {"role": "user", "content": "y", "b": None}]}, ""),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "a": None}], "b": None}]}, ""),
        ({"response_format": {"type": "text", "a": None}, "logit_bias": {"5": 1}, "a": None}, ""),
        ({"tools": [{"type": "function", "a": None, "function": {"name": "f", "a": None}}]}, ""),
        ({"messages": [{**USER[0], "a": None}, {**USER[0], "a": 0}]}, "messages[1].a"),
        ({"a": None, "messages": None}, "messages"),
        ({"a": None, "temperature": "1"}, "temperature"),
        ({"a": None, "b": False}, "b"),
    ],
    ids=str,
)
async def test_a_null_field_of_any_name_says_nothing(rig: HttpRig, extra: dict[str, Any], param: str) -> None:
    """Clients write all the fields that they know, used or not; what is wrong beside them is told as ever."""
    body = {"messages": USER, **extra}
    if param:
        assert (await refusal(rig, body))["param"] == param
        return
    reply = await rig.post(CHAT, body)
    assert reply.status_code == 200, reply.text


async def test_a_null_within_a_schema_is_no_field(rig: HttpRig) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"const": None}}}}}]
    reply = await rig.post("/tokenize", {"messages": USER, "tools": tools})
    with_nulls = await rig.post("/tokenize", {"messages": USER, "tools": [{**tools[0], "a": None}], "b": None})
    assert reply.json() == with_nulls.json()


@pytest.mark.parametrize("body_type", [ChatBody, CompletionBody], ids=lambda body_type: body_type.__name__)
async def test_every_field_that_is_not_offered_is_refused_by_name_unless_it_asks_for_nothing(
    rig: HttpRig, body_type: Any
) -> None:
    prompt, path = ({"messages": USER}, CHAT) if body_type is ChatBody else ({"prompt": "x"}, COMPLETIONS)
    names = fields_of(body_type, NotOffered)
    assert {"functions", "service_tier", "suffix", "response_format"} & set(names)
    for name in names:
        error = await refusal(rig, {**prompt, name: {"asks": "for something"}}, path)
        assert (error["code"], error["param"]) == ("unsupported_parameter", name)
        for value in (None, *NEUTRAL.get(name, ())):
            reply = await rig.post(path, {**prompt, name: value})
            assert reply.status_code == 200, (name, value, reply.text)


@pytest.mark.parametrize(
    ("message", "param", "words"),
    [
        ({"role": "function", "content": "4", "name": "f"}, "role", "'function' is not supported; use 'tool'"),
        ({"role": "robot", "content": "4"}, "role", "must be one of system, developer, user, assistant, tool"),
        ({"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]}, "tool_calls[0].function", "is missing"),
        ({"role": "tool", "tool_call_id": "c"}, "content", "is missing"),
        ({"role": "user", "content": [{"type": "text", "text": "x", "image_url": {"url": "u"}}]},
         "content[0].image_url", "is not supported yet"),
        ({"role": "user", "content": [{"type": "text", "text": "x", "input_audio": {"data": ""}}]},
         "content[0].input_audio", "is not supported yet"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}, "content[0].type", "'text'"),
        ({"role": "user", "content": [{"type": "text"}]}, "content[0].text", "is missing"),
        ({"role": "user"}, "content", "is missing"),
    ],
)  # fmt: skip
async def test_a_message_is_refused_in_words_that_say_what_is_missing(
    rig: HttpRig, message: dict[str, Any], param: str, words: str
) -> None:
    error = await refusal(rig, {"messages": [*USER, message]})
    assert error["param"] == f"messages[1].{param}"
    assert words in error["message"]


async def test_an_argument_that_the_template_does_not_read_is_refused(rig: HttpRig) -> None:
    error = await refusal(rig, {"messages": USER, "chat_template_kwargs": {"enable_thinking": False}})
    assert error["param"] == "chat_template_kwargs"
    assert "'enable_thinking'" in error["message"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_usage_is_in_every_event_when_asked_for_and_ends_as_the_total(rig: HttpRig, path: str) -> None:
    prompt: dict[str, Any] = {"messages": USER} if path == CHAT else {"prompt": ["x", "yz"]}
    options = {"include_usage": True, "continuous_usage_stats": True}
    reply = await rig.post(path, {**prompt, "n": 2, "stream": True, "stream_options": options})
    events = [json.loads(line[6:]) for line in reply.text.split("\n\n")[:-2]]
    usages = [event["usage"] for event in events]
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts)
    assert counts[0] <= 1 and counts[-1] > 1
    assert usages[-2] == usages[-1]
    assert {usage["prompt_tokens"] for usage in usages} == {usages[-1]["prompt_tokens"]}
    assert events[-1]["choices"] == []


async def test_usage_is_in_every_event_without_a_last_one_when_only_that_is_asked_for(rig: HttpRig) -> None:
    options = {"continuous_usage_stats": True}
    reply = await rig.post(COMPLETIONS, {"prompt": "x", "stream": True, "stream_options": options})
    events = [json.loads(line[6:]) for line in reply.text.split("\n\n")[:-2]]
    assert all(event["choices"] and event["usage"]["total_tokens"] for event in events)
