"""`/v1/responses` as the `openai` client sees it: text, items, tools, reasoning, streams, limits, what is refused."""

import contextlib
import json
import random
from typing import Any

import httpx
import openai
import pydantic
import pytest
from openai.types.responses import Response

from common.values.errors import PdserveError
from common.values.request import FinishReason, SampledToken
from router.core.generation import Failed
from router.front.http.responses import ResponseEndpoint
from router.front.openai.items.answers import MessageOutput
from router.front.openai.items.messages import messages_of
from router.front.openai.items.render import ItemWriter
from router.text.calls.choice import FormattedChoice
from router.text.calls.parser import Format
from router.text.choice_text import ChoiceDelta, ChoiceEnd
from router.text.token_text import TokenTexts
from tests.router.front.http_rig import HttpRig, ids, in_flight, rig_of, saying
from tests.router.front.scripted_service import Pause, ScriptedService, accepted, answer
from tests.router.text.tokenizers_for_tests import byte_tokenizer

PATH = "/v1/responses"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "weather", "description": "of a city", "parameters": SCHEMA}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
ANSWER = f"<think>Rome, then.</think>\nLet me see.\n{CALL}\n{CALL.replace('Rome', 'Oslo')}"
LOGPROBS = "message.output_text.logprobs"


async def ask(rig: HttpRig, **stated: Any) -> Response:
    answer: Response = await rig.openai.responses.create(**{"model": "tiny", "input": "Hi"} | stated)
    return answer


async def streamed(rig: HttpRig, **stated: Any) -> list[Any]:
    events = await rig.openai.responses.create(**{"model": "tiny", "input": "Hi", "stream": True} | stated)
    return [event async for event in events]


async def refused(rig: HttpRig, **stated: Any) -> tuple[str, str]:
    """Field and message."""
    reply = await rig.post(PATH, {"model": "tiny", "input": "Hi"} | stated)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    return error["param"], error["message"]


async def test_a_text_is_answered_by_one_message_and_the_values_that_applied() -> None:
    async with rig_of(saying("Hello.")) as rig:
        answer = await ask(rig, temperature=0.5, top_p=0.9, metadata={"a": "b"}, max_output_tokens=99, user="me")
        text = (await rig.post(PATH, {"input": "Hi"})).json()
    assert (answer.status, answer.output_text, answer.error, answer.incomplete_details) == (
        *("completed", "Hello."),
        *(None, None),
    )
    assert (answer.temperature, answer.top_p, answer.metadata) == (0.5, 0.9, {"a": "b"})
    assert (answer.max_output_tokens, answer.user, answer.store, answer.model) == (99, "me", False, "tiny")
    assert answer.id.startswith("resp_") and answer.output[0].id.startswith("msg_")  # type: ignore[union-attr]
    assert answer.usage is not None
    assert answer.usage.output_tokens == len(ids("Hello.")) + 1
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    Response.model_validate(text, strict=True)


async def test_every_field_that_the_specification_requires_is_there() -> None:
    """The list of Open Responses, 2026-04-24."""
    required = (
        "id object created_at completed_at status incomplete_details model previous_response_id instructions output "
        "error tools tool_choice truncation parallel_tool_calls text top_p presence_penalty frequency_penalty "
        "top_logprobs temperature reasoning user usage max_output_tokens max_tool_calls store background service_tier "
        "metadata safety_identifier prompt_cache_key"
    )
    async with rig_of(saying("Hello.")) as rig:
        answer = (await rig.post(PATH, {"input": "Hi"})).json()
    assert set(answer) == set(required.split())


async def test_thought_text_and_calls_are_items_of_their_own() -> None:
    async with rig_of(saying(ANSWER), reasoning="think") as rig:
        answer = await ask(rig, tools=[WEATHER])
    thought, message, *calls = answer.output
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call", "function_call"]
    assert thought.content[0].text == "Rome, then."  # type: ignore[union-attr,index]
    assert message.content[0].text.strip() == "Let me see."  # type: ignore[union-attr,index]
    assert [json.loads(call.arguments)["city"] for call in calls] == ["Rome", "Oslo"]  # type: ignore[union-attr]
    assert answer.tools[0].strict is False  # type: ignore[union-attr]
    assert answer.usage is not None
    assert 0 < answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens


async def test_a_stream_builds_up_what_the_whole_answer_is() -> None:
    async with rig_of(saying(ANSWER), reasoning="think") as rig:
        whole = await ask(rig, tools=[WEATHER])
        events = await streamed(rig, tools=[WEATHER])
        async with rig.openai.responses.stream(model="tiny", input="Hi", tools=[WEATHER]) as stream:
            final = await stream.get_final_response()
    kinds = [event.type for event in events]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[-1] == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    for each in (events[-1].response, final):
        assert told(each) == told(whole)
    for index, item in enumerate(events[-1].response.output):
        own = [event for event in events if getattr(event, "output_index", None) == index]
        assert (own[0].type, own[-1].type) == ("response.output_item.added", "response.output_item.done")
        deltas = "".join(event.delta for event in own if event.type.endswith(".delta"))
        assert deltas == (item.arguments if item.type == "function_call" else item.content[0].text)
        assert own[0].item.status == "in_progress" and own[-1].item == item


def told(answer: Response) -> list[Any]:
    """Without ids, which differ from answer to answer."""
    dumped = answer.model_dump()["output"]
    for item in dumped:
        item.pop("id"), item.pop("call_id", None), item.pop("parsed_arguments", None)
        for part in item.get("content") or ():
            part.pop("parsed", None)
    return [*dumped, answer.status]


async def test_frames_are_named_and_end_as_the_specification_says() -> None:
    async with rig_of(saying("Hello.")) as rig:
        text = (await rig.post(PATH, {"input": "Hi", "stream": True})).text
    *frames, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    for frame in frames:
        name, data = frame.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"


async def test_an_answer_that_is_cut_is_incomplete() -> None:
    async with rig_of(saying("Hello", FinishReason.LENGTH)) as rig:
        whole, events = await ask(rig), await streamed(rig)
    assert events[-1].type == "response.incomplete"
    for each in (whole, events[-1].response):
        assert each.status == "incomplete" and each.completed_at is None
        assert each.incomplete_details.reason == "max_output_tokens"
        assert each.output[-1].status == "incomplete"


async def test_a_call_that_is_cut_is_incomplete() -> None:
    async with rig_of(saying('<tool_call>\n{"name": "weather", "arguments": {"city": "Ro', FinishReason.LENGTH)) as rig:
        answer = await ask(rig, tools=[WEATHER])
    assert [(item.type, item.status) for item in answer.output] == [("function_call", "incomplete")]  # type: ignore[union-attr]


async def test_a_call_alone_comes_without_a_message() -> None:
    async with rig_of(saying(f"\n\n{CALL}")) as rig:
        answer = await ask(rig, tools=[WEATHER])
    assert [item.type for item in answer.output] == ["function_call"]


async def test_an_answer_without_a_word_has_one_empty_message() -> None:
    async with rig_of(saying("")) as rig:
        answer = await ask(rig)
    assert (answer.output_text, [item.type for item in answer.output]) == ("", ["message"])


async def test_logprobs_come_with_the_text_they_are_of() -> None:
    async with rig_of(saying("Hello.")) as rig:
        answer = await ask(rig, include=[LOGPROBS], top_logprobs=2)
        events = await streamed(rig, include=[LOGPROBS], top_logprobs=2)
    whole = answer.output[0].content[0].logprobs  # type: ignore[union-attr,index]
    assert whole is not None and len(whole) == len(ids("Hello."))
    pieces = [logprob for event in events if event.type == "response.output_text.delta" for logprob in event.logprobs]
    assert [each.token for each in pieces] == [each.token for each in whole]


async def test_a_schema_constrains_and_is_parsed() -> None:
    class City(pydantic.BaseModel):
        city: str

    service = saying('{"city": "Rome"}')
    async with rig_of(service) as rig:
        answer = await rig.openai.responses.parse(model="tiny", input="Hi", text_format=City)
    assert answer.output_parsed == City(city="Rome")
    assert "city" in service.submitted[0].sampling.grammar


async def test_a_conversation_comes_back_as_items_and_goes_to_the_template_as_messages() -> None:
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Rome?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Rome"}', "id": "fc_1"},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "20"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "21"}]},
        {"role": "assistant", "content": "20 and 21."},
        {"role": "user", "content": "Thanks."},
    ]  # fmt: skip
    calls = [
        {"id": name, "type": "function", "function": {"name": "weather", "arguments": arguments}}
        for name, arguments in (("c1", {"city": "Rome"}), ("c2", {}))
    ]
    assert messages_of(items, "Rules.") == (
        {"role": "system", "content": "Rules."},
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Rome?"},
        {"role": "assistant", "content": "I look.", "reasoning": "Hm.", "reasoning_content": "Hm.",
         "tool_calls": calls},
        {"name": "weather", "role": "tool", "content": "20", "tool_call_id": "c1"},
        {"name": "weather", "role": "tool", "content": "21", "tool_call_id": "c2"},
        {"role": "assistant", "content": "20 and 21."},
        {"role": "user", "content": "Thanks."},
    )  # fmt: skip
    async with rig_of(saying(ANSWER), reasoning="think") as rig:
        answer = await ask(rig, tools=[WEATHER])
        back = [item.model_dump(exclude_none=True) for item in answer.output]
        assert (await ask(rig, input=[*items, *back], tools=[WEATHER])).status == "completed"


@pytest.mark.parametrize(
    ("stated", "param", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the items as input"),
        ({"conversation": "conv_1"}, "conversation", "send the items as input"),
        ({"background": True}, "background", "not supported"),
        ({"truncation": "auto"}, "truncation", "not supported"),
        ({"input": []}, "input", "empty"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type", "send the item itself"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type", "not supported"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
         "input[0].content[0].type", "only text"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "one of"),
        ({"input": [{"role": "user"}]}, "input[0].content", "missing"),
        ({"input": [{"role": "user", "content": "x", "colour": 1}]}, "input[0].colour", "unknown field"),
        ({"input": [7]}, "input[0]", "expected"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]},
         "input[0].arguments", "JSON"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]},
         "input[0].encrypted_content", "not supported"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "function"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "letters"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].function", "unknown field"),
        ({"tool_choice": {"type": "function", "name": "g"}, "tools": [WEATHER]}, "tool_choice", "none of the tools"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"top_logprobs": 2}, "top_logprobs", "include"),
        ({"include": ["everything"]}, "include[0]", "one of"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "schema"),
        ({"text": {"verbosity": "high"}}, "text.verbosity", "not supported"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary", "not supported"),
        ({"max_output_tokens": 5000}, "max_output_tokens", "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens", "did you mean"),
        ({"n": 2}, "n", "one answer"),
        ({"best_of": 2}, "best_of", "one answer"),
        ({"prompt_logprobs": 1}, "prompt_logprobs", "not supported"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options", "stream"),
    ],
    ids=str,
)  # fmt: skip
async def test_what_would_change_the_answer_is_refused_by_name(stated: dict[str, Any], param: str, words: str) -> None:
    async with rig_of(saying("Hello.")) as rig:
        found = await refused(rig, **stated)
    assert found[0] == param and words in found[1], found


async def test_what_changes_no_answer_is_accepted() -> None:
    async with rig_of(saying("Hello.")) as rig:
        await ask(rig, store=True, service_tier="auto", truncation="disabled", background=False, max_tool_calls=3,
                  prompt_cache_key="k", safety_identifier="s", include=["reasoning.encrypted_content"],
                  input=[{"role": "user", "content": "x", "colour": None}],
                  text={"verbosity": "medium"}, reasoning={"effort": None}, parallel_tool_calls=False)  # fmt: skip


async def test_a_choice_of_tools_is_the_one_that_chats_have() -> None:
    service = saying(CALL)
    async with rig_of(service, tools="hermes") as rig:
        answer = await ask(rig, tools=[WEATHER], tool_choice={"type": "function", "name": "weather"})
        some = [{"type": "function", "name": "weather"}]
        await ask(rig, tools=[WEATHER], tool_choice={"type": "allowed_tools", "mode": "required", "tools": some})
    assert all(request.sampling.grammar for request in service.submitted)
    assert answer.tool_choice.name == "weather"  # type: ignore[union-attr]


async def test_an_error_in_a_stream_is_a_failed_response() -> None:
    service = ScriptedService(lambda request: [*answer(request, ids("Hello."))[:2], Failed(PdserveError("broken"))])
    async with rig_of(service) as rig:
        events = await streamed(rig)
        with pytest.raises(openai.InternalServerError):
            await ask(rig)
    assert events[-1].type == "response.failed"
    assert events[-1].response.status == "failed" and events[-1].response.error.message == "broken"


async def test_a_client_that_leaves_ends_its_request() -> None:
    service = ScriptedService(lambda request: [accepted(request), Pause()])
    async with rig_of(service) as rig:
        for stream in (False, True):
            with contextlib.suppress(httpx.ReadTimeout):
                await rig.client.post(PATH, json={"input": "Hi", "stream": stream}, timeout=0.5)
            await in_flight(rig.frontend, 0)
    assert len(service.cancelled) == 2


def test_the_space_that_a_message_begins_with_keeps_its_logprobs() -> None:
    writer = ItemWriter("x", 0, TokenTexts(byte_tokenizer()))
    for word in (" ", " ", "Hi"):
        writer.push(ChoiceDelta(0, (SampledToken(ord(word[0]), -1.0),), word))
    writer.push(ChoiceDelta(0, (), "", ChoiceEnd(FinishReason.STOP, 3)))
    (item,) = writer._items
    assert isinstance(item, MessageOutput)
    assert (item.content[0].text, len(item.content[0].logprobs)) == ("  Hi", 3)


def test_any_cutting_of_the_text_gives_the_same_items() -> None:
    texts, rng = TokenTexts(byte_tokenizer()), random.Random(5)
    found = set()
    for _ in range(60):
        cuts = sorted(rng.sample(range(1, len(ANSWER)), rng.randrange(0, 20)))
        choice = FormattedChoice(Format(reasoning="think", tools="hermes"), "seed")
        writer = ItemWriter("x", None, texts)
        for begin, end in zip([0, *cuts], [*cuts, len(ANSWER)], strict=True):
            writer.push(choice.apply(ChoiceDelta(0, (SampledToken(1, None),), ANSWER[begin:end])))
        writer.push(choice.apply(ChoiceDelta(0, (), "", ChoiceEnd(FinishReason.STOP, 1))))
        found.add(str(writer._items))
    assert len(found) == 1


def test_the_endpoint_keeps_nothing() -> None:
    assert set(vars(ResponseEndpoint(None, None))) == {"_frontend", "_settings", "_decoder"}  # type: ignore[arg-type]
