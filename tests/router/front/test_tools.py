"""Tool calls and reasoning over HTTP, as the `openai` client sees them: whole, streamed, truncated, malformed."""

import json
from typing import Any

import pytest

from common.guided import grammar
from common.values.request import FinishReason
from router.front.http import stream
from router.text.calls.forms import FORMS
from tests.router.front.http_rig import HttpRig, ids, rig_of, saying
from tests.router.text.tokenizers_for_tests import EOS_ID

USER = [{"role": "user", "content": "How warm is it in Rome?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": SCHEMA}}
TIME = {"type": "function", "function": {"name": "time"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
CHAT = "/v1/chat/completions"
ASKED: dict[str, Any] = {"model": "tiny", "messages": USER, "tools": [WEATHER, TIME]}
TWO_GRAMMARS = json.dumps({"grammars": [{"lark_grammar": 'start: "a"'}] * 2})
MALFORMED = '<tool_call>{"name": "weather", "arguments": {city}}</tool_call>'


async def ask(rig: HttpRig, **stated: Any) -> Any:
    return await rig.openai.chat.completions.create(**ASKED | stated)


async def streamed(rig: HttpRig, **stated: Any) -> tuple[list[Any], Any]:
    """The chunks' choices, and what the client makes of all of them."""
    async with rig.openai.chat.completions.stream(**ASKED | stated) as stream:
        choices = [event.chunk.choices[0] async for event in stream if event.type == "chunk" and event.chunk.choices]
        return choices, (await stream.get_final_completion()).choices


async def test_a_call_is_a_tool_call_and_ends_as_one() -> None:
    async with rig_of(saying(f"Let me see.\n{CALL}")) as rig:
        (choice,) = (await ask(rig)).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "weather")
    assert json.loads(call.function.arguments) == {"city": "Rome"}
    assert call.id.startswith("call_")


async def test_a_call_alone_has_no_content() -> None:
    async with rig_of(saying(CALL)) as rig:
        message = (await rig.post(CHAT, {"messages": USER, "tools": [WEATHER]})).json()["choices"][0]["message"]
    assert message["content"] is None and "reasoning" not in message


async def test_a_streamed_call_begins_with_its_id_and_name_and_goes_on_with_arguments() -> None:
    async with rig_of(saying(f"Let me see.\n{CALL}\n{CALL.replace('Rome', 'Oslo')}")) as rig:
        choices, (final,) = await streamed(rig)
    deltas = [call for choice in choices for call in choice.delta.tool_calls or ()]
    begins = [call for call in deltas if call.id]
    assert [(call.index, call.type, call.function.name, call.function.arguments) for call in begins] == [
        (0, "function", "weather", ""),
        (1, "function", "weather", ""),
    ]
    assert begins[0].id != begins[1].id
    others = [call for call in deltas if not call.id]
    assert len(others) > 20 and not any(call.function.name or call.type for call in others)
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["tool_calls"]
    assert choices[-1].finish_reason and choices[0].delta.role == "assistant"
    assert final.message.content == "Let me see."
    assert [json.loads(call.function.arguments)["city"] for call in final.message.tool_calls] == ["Rome", "Oslo"]


async def test_streamed_and_whole_answers_are_the_same() -> None:
    async with rig_of(saying(f"<think>Hm.</think>Let me see.\n{CALL}\n{CALL}"), reasoning="think") as rig:
        (whole,) = (await ask(rig)).choices
        _, (final,) = await streamed(rig)
    assert final.message.content == whole.message.content
    assert final.message.reasoning_content == whole.message.reasoning_content == "Hm."
    functions = [[call.function.model_dump(exclude={"parsed_arguments"}) for call in message.tool_calls]
                 for message in (whole.message, final.message)]  # fmt: skip
    assert functions[0] == functions[1]
    assert [call.id for call in whole.message.tool_calls] != [call.id for call in final.message.tool_calls]


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_truncated_call_ends_with_length_and_the_beginning_of_its_arguments(is_streamed: bool) -> None:
    async with rig_of(saying(CALL[:60], FinishReason.LENGTH)) as rig:
        if is_streamed:
            reply = await rig.post(CHAT, {"messages": USER, "tools": [WEATHER], "stream": True})
            choices = [json.loads(line[6:])["choices"][0] for line in reply.text.split("\n\n")[:-2]]
            parts = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
            name, arguments = parts[0]["function"]["name"], "".join(part["function"]["arguments"] for part in parts)
            reason = choices[-1]["finish_reason"]
        else:
            (choice,) = (await ask(rig)).choices
            function, reason = choice.message.tool_calls[0].function, choice.finish_reason
            name, arguments = function.name, function.arguments
    assert (reason, name) == ("length", "weather")
    assert '{"city": "Rome"}'.startswith(arguments) and arguments


@pytest.mark.parametrize("text", [MALFORMED, "<tool_call>", CALL[:50]])
async def test_a_malformed_call_is_content_in_a_whole_answer(text: str) -> None:
    async with rig_of(saying(text)) as rig:
        (choice,) = (await ask(rig)).choices
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", text, None)


async def test_a_malformed_call_that_is_streamed_loses_no_text_and_is_no_call_to_answer() -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"city": Rome}}</tool_call>'
    async with rig_of(saying(text)) as rig:
        choices, _ = await streamed(rig)
    assert choices[-1].finish_reason == "stop"
    content = "".join(choice.delta.content or "" for choice in choices)
    arguments = "".join(call.function.arguments for choice in choices for call in choice.delta.tool_calls or ())
    assert arguments == '{"city": ' and content == "Rome}}</tool_call>"


@pytest.mark.parametrize("text", [CALL, "<think>Hm.</think>Yes."])
async def test_a_token_that_says_nothing_writes_nothing(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Markers, and a thought that is not wanted: no event without a word, and no write that puts off a keep-alive."""
    written: list[bytes] = []
    send = stream._send_in_time

    async def seen(scope: Any, send_: Any, message: Any) -> None:
        if message.get("more_body"):
            written.append(message["body"])
        await send(scope, send_, message)

    monkeypatch.setattr(stream, "_send_in_time", seen)
    async with rig_of(saying(text), reasoning="think") as rig:
        body = {"messages": USER, "tools": [WEATHER], "stream": True, "include_reasoning": False}
        reply = await rig.post(CHAT, body)
    assert b"".join(written) == reply.content and b"" not in written
    choices = [json.loads(line[6:])["choices"][0] for line in reply.text.split("\n\n")[:-2]]
    assert all(choice["delta"] for choice in choices)


async def test_every_choice_has_calls_of_its_own() -> None:
    async with rig_of(saying(CALL)) as rig:
        choices = (await ask(rig, n=3)).choices
        _, finals = await streamed(rig, n=3)
    calls = [choice.message.tool_calls[0] for choice in (*choices, *finals)]
    assert len({call.id for call in calls}) == 6
    assert {call.function.arguments for call in calls} == {'{"city": "Rome"}'}


async def test_logprobs_and_token_ids_cover_every_token_of_a_call() -> None:
    expected = [*ids(CALL), EOS_ID]
    async with rig_of(saying(CALL)) as rig:
        body = {"messages": USER, "tools": [WEATHER], "logprobs": True, "return_token_ids": True}
        whole = (await rig.post(CHAT, body)).json()["choices"][0]
        reply = await rig.post(CHAT, body | {"stream": True})
    choices = [json.loads(line[6:])["choices"][0] for line in reply.text.split("\n\n")[:-2]]
    assert whole["token_ids"] == expected
    assert [token_id for choice in choices for token_id in choice.get("token_ids", ())] == expected
    logprobs = [each for choice in choices for each in (choice["logprobs"] or {"content": []})["content"]]
    assert logprobs == whole["logprobs"]["content"] and len(logprobs) == len(expected)


async def test_a_stop_string_ends_the_text_before_a_call() -> None:
    async with rig_of(saying(f"Let me see. STOP {CALL}")) as rig:
        (choice,) = (await ask(rig, stop="STOP")).choices
        (in_call,) = (await ask(rig, stop="Rome")).choices
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", "Let me see. ", None)
    assert (in_call.finish_reason, in_call.message.tool_calls) == ("stop", None)


async def test_a_second_call_is_passed_over_where_only_one_is_wanted() -> None:
    async with rig_of(saying(f"{CALL}{CALL}")) as rig:
        (choice,) = (await ask(rig, parallel_tool_calls=False)).choices
        _, (final,) = await streamed(rig, parallel_tool_calls=False)
    assert len(choice.message.tool_calls) == len(final.message.tool_calls) == 1


async def test_without_tools_or_with_none_the_text_is_the_text_and_the_model_is_not_told() -> None:
    service = saying(CALL)
    async with rig_of(service) as rig:
        plain, none = [(await ask(rig, **stated)).choices[0] for stated in ({"tools": []}, {"tool_choice": "none"})]
        await ask(rig)
    assert plain.message.content == none.message.content == CALL
    assert (plain.finish_reason, none.finish_reason) == ("stop", "stop")
    lengths = [len(request.token_ids) for request in service.submitted]
    assert lengths[0] == lengths[1] < lengths[2]


async def test_a_whole_conversation_with_a_tool_reaches_the_model() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    service = saying("30 degrees.")
    messages = [*USER, {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "call_1", "content": '{"celsius": 30}'}]  # fmt: skip
    async with rig_of(service) as rig:
        answered = await ask(rig, messages=messages)
        prompt = rig.frontend.tokenizer.decode(service.submitted[0].token_ids)
    assert answered.choices[0].message.content == "30 degrees."
    for part in ("<tools>\n", '"name": "weather"', CALL, '<tool_response>\n{"celsius": 30}\n</tool_response>'):
        assert part in prompt


# ---- what answers are held to ---------------------------------------------------------------------------


async def grammars_of(*bodies: dict[str, Any], **dialect: Any) -> list[str]:
    service = saying("ok")
    async with rig_of(service, **dialect) as rig:
        for body in bodies:
            reply = await rig.post(CHAT, {"messages": USER, "tools": [WEATHER, TIME]} | body)
            assert reply.status_code == 200, reply.text
    return [request.sampling.grammar for request in service.submitted]


async def test_a_call_is_guided_when_it_must_be_made_is_strict_or_one_of_some() -> None:
    strict = WEATHER | {"function": WEATHER["function"] | {"strict": True}}  # type: ignore[operator]
    some = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [_named("time")]}}
    choices = [{"tool_choice": choice} for choice in ("auto", "none", "required", _named("time"), some)]
    found = await grammars_of({}, *choices, {"tools": [strict]})
    assert [bool(text) for text in found] == [False, False, False, True, True, True, True]
    assert len(set(found)) == 5


def _named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("stated", "param", "word"),
    [
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "'x'"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function", "names no function"),
        ({"tool_choice": "any"}, "tool_choice", "nvalid"),
        ({"tools": [WEATHER, WEATHER]}, "tools", "one name"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type", "function"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "missing"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "letters"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}]},
         "tools[0].function.parameters", "object"),
        ({"tools": [{"type": "function", "function": {"name": "a", "strict": True,
                    "parameters": {"properties": {"x": {"not": {}}}}}}]},
         "tools[0].function.parameters", "cannot be enforced"),
        ({"functions": [{"name": "f"}]}, "functions", "use tools"),
        ({"function_call": "auto"}, "function_call", "use tool_choice"),
        ({"tools": [TIME] * 200}, "tools", "more than 128"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}]},
         "messages[0].tool_calls", "assistant"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "c"}]}, "messages[0].tool_call_id", "tool"),
        ({"messages": [{"role": "assistant", "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{"}}]}]},
         "messages[0].tool_calls[0].function.arguments", "no JSON"),
        ({"messages": [{"role": "assistant", "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": "[1]"}}]}]},
         "messages[0].tool_calls[0].function.arguments", "JSON object"),
    ],
)  # fmt: skip
async def test_what_cannot_be_done_is_refused_by_name(stated: dict[str, Any], param: str, word: str) -> None:
    service = saying("ok")
    async with rig_of(service) as rig:
        reply = await rig.post(CHAT, {"messages": USER, "tools": [WEATHER, TIME]} | stated)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param), error
    assert word in error["message"]
    assert service.submitted == []


async def test_without_a_tool_parser_tools_are_refused_by_name() -> None:
    async with rig_of(saying("ok"), tools="") as rig:
        reply = await rig.post(CHAT, {"messages": USER, "tools": [WEATHER]})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tools")


async def test_what_a_schema_asks_that_cannot_be_enforced_is_left_out_where_the_function_is_not_strict() -> None:
    loose = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"not": {}}}}}}
    (text,) = await grammars_of({"tools": [loose], "tool_choice": "required"})
    schemas = [part.get("json_schema") for part in json.loads(text)["grammars"]]
    any_object = json.loads(grammar.of_json_object())["grammars"][0]["json_schema"]
    assert [schema for schema in schemas if schema] == [any_object]


async def test_an_answer_with_a_schema_beside_tools_is_either() -> None:
    format_ = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "array"}}}
    (text,) = await grammars_of({"response_format": format_})
    assert {part["name"] for part in json.loads(text)["grammars"]} == {"", "answer", "arguments_0", "arguments_1"}


# ---- reasoning ------------------------------------------------------------------------------------------


async def test_a_thought_is_told_apart_under_both_names() -> None:
    async with rig_of(saying("<think>\nHm.\n</think>\n\nYes."), reasoning="think") as rig:
        message = (await rig.post(CHAT, {"messages": USER})).json()["choices"][0]["message"]
        silent = (await rig.post(CHAT, {"messages": USER, "include_reasoning": False})).json()["choices"][0]["message"]
        choices, _ = await streamed(rig, tools=[])
    assert (message["content"], message["reasoning"], message["reasoning_content"]) == ("Yes.", "Hm.", "Hm.")
    assert silent["content"] == "Yes." and "reasoning" not in silent
    assert "".join(getattr(choice.delta, "reasoning", "") or "" for choice in choices) == "Hm."
    assert "".join(choice.delta.content or "" for choice in choices) == "Yes."


async def test_a_thought_that_is_cut_is_all_there_is() -> None:
    async with rig_of(saying("<think>Hm", FinishReason.LENGTH), reasoning="think") as rig:
        (choice,) = (await ask(rig, tools=[])).choices
    assert (choice.finish_reason, choice.message.content, choice.message.reasoning) == ("length", None, "Hm")


async def test_a_constraint_holds_for_what_comes_behind_the_thought() -> None:
    (text,) = await grammars_of({"tools": [], "guided_choice": ["a", "b"]}, reasoning="think")
    assert "think" in text and '"answer"' in text
    (plain,) = await grammars_of({"tools": [], "guided_choice": ["a", "b"]})
    assert plain == grammar.of_choice(["a", "b"])


@pytest.mark.parametrize("text", [TWO_GRAMMARS, "{"])
async def test_a_grammar_that_cannot_stand_beside_tools_is_refused_by_name(text: str) -> None:
    async with rig_of(saying("ok")) as rig:
        reply = await rig.post(CHAT, {"messages": USER, "tools": [WEATHER], "guided_grammar": text})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "guided_grammar")


async def test_models_say_which_parsers_they_have() -> None:
    async with rig_of(saying("ok"), tools="mistral", reasoning="think", form=FORMS["mistral"]) as rig:
        card = (await rig.client.get("/v1/models")).json()["data"][0]
    assert (card["tool_parser"], card["reasoning_parser"]) == ("mistral", "think")


async def test_the_ids_of_mistral_calls_have_nine_letters_as_its_templates_want() -> None:
    async with rig_of(saying('[TOOL_CALLS]f[ARGS]{"a": 1}'), tools="mistral", form=FORMS["mistral"]) as rig:
        (choice,) = (await ask(rig)).choices
    call_id = choice.message.tool_calls[0].id
    assert len(call_id) == 9 and call_id.isalnum()
