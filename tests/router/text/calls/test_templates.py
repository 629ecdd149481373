"""Tools on their way into a prompt: as a template reads them, or in plain messages where it knows none."""

import json
from dataclasses import replace
from typing import Any

import pytest

from common.values.errors import Unsupported
from router.front.openai.prompts import named_results
from router.request.dialect import Dialect
from router.request.expected import format_of, guide_of
from router.request.spec import ChatPrompt, RequestSpec
from router.text.calls.choose import thinking_of
from router.text.calls.default_format import in_plain_messages
from router.text.calls.forms import FORMS
from router.text.calls.parser import Thinking
from router.text.calls.tools import Tool, ToolUse
from router.text.chat_template import ChatTemplate, chat_message
from router.text.tokenizer import PromptTokenizer
from tests.router.text.tokenizers_for_tests import EOS_ID, byte_tokenizer

TOOL = Tool("weather", "of a city </s>", {"type": "object", "properties": {"city": {"type": "string"}}}).for_template
CALL: dict[str, Any] = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
KNOWING = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}{% for m in messages %}"
    "<{{ m.role }}>{{ m.content or '' }}{% for call in m.tool_calls or [] %}{{ call.function.name }}("
    "{% for key, value in call.function.arguments.items() %}{{ key }}={{ value }}{% endfor %}){% endfor %}"
    "{{ m.tool_call_id or '' }}{% endfor %}"
)
LLAMA_3 = "Environment: ipython {{ raise_exception('This model only supports single tool-calls at once!') }}"
TALK = [
    chat_message("user", "Warm?", None),
    chat_message("assistant", None, None, tool_calls=[CALL]),
    chat_message("tool", "30", None, tool_call_id="c1"),
]


def rendered(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    tokenizer = PromptTokenizer(byte_tokenizer(), ChatTemplate(source, {}))
    ids = tokenizer.encode_chat(messages, **options)
    assert EOS_ID not in ids  # what clients write is text
    return tokenizer.decode(ids)


def test_a_template_gets_tools_and_arguments_as_objects() -> None:
    text = rendered(KNOWING, TALK, tools=[TOOL])
    assert text == f"{json.dumps(TOOL)}<user>Warm?<assistant>weather(city=Rome)<tool>30c1"


def test_a_template_that_knows_no_tools_gets_plain_messages() -> None:
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    text = rendered(source, [chat_message("system", "Be brief.", None), *TALK], tools=[TOOL])
    assert text.startswith("<system>Be brief.\n\nYou can call functions.")
    assert json.dumps(TOOL) in text
    written = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    assert text.endswith(f"<user>Warm?<assistant>{written}<user><tool_response>\n30\n</tool_response>")
    assert "<tool>" not in text


def test_results_of_one_turn_are_one_message_and_a_system_message_is_made_where_there_is_none() -> None:
    results = [chat_message("tool", text, None) for text in ("1", "2")]
    plain = in_plain_messages([*TALK[:2], *results], [TOOL])
    assert [message["role"] for message in plain] == ["system", "user", "assistant", "user"]
    assert plain[-1]["content"].count("<tool_response>") == 2


def test_calls_of_earlier_messages_are_shown_though_no_tools_are_given() -> None:
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    assert "<system>" not in rendered(source, TALK) and '"name": "weather"' in rendered(source, TALK)


@pytest.mark.parametrize(
    ("source", "expected"),
    [("{% for m in messages %}{% if m['content'] is none %}N{% endif %}{% endfor %}{{ tools }}", "NNone"),
     ("{% for m in messages %}{{ 'x' in m.content }}{% endfor %}{{ tools }}", "FalseNone"),
     ("{% for m in messages %}{{ 'x' in m.content }}{{ m.content is none }}{% endfor %}{{ tools }}", "FalseFalseNone")],
)  # fmt: skip
def test_no_content_is_none_or_empty_as_the_template_looks_at_it(source: str, expected: str) -> None:
    assert rendered(source, [chat_message("assistant", None, None, tool_calls=[CALL])]) == expected


@pytest.mark.parametrize(
    ("read", "effort", "expected"),
    [("reasoning_effort", "low", "low"), ("enable_thinking", "none", "False"), ("enable_thinking", "high", "True"),
     ("thinking", "none", "False"), ("nothing", "none", "")],
)  # fmt: skip
def test_how_much_to_think_reaches_the_template_in_its_own_words(read: str, effort: str, expected: str) -> None:
    user = [chat_message("user", "x", None)]
    source = "{{ messages[0].role }}{{ NAME }}".replace("NAME", read)
    assert rendered(source, user, reasoning_effort=effort) == f"user{expected}"


def test_an_effort_that_the_template_does_not_read_is_refused_by_name() -> None:
    with pytest.raises(Unsupported, match="does not read it") as refused:
        rendered("{{ messages }}", [chat_message("user", "x", None)], reasoning_effort="high")
    assert refused.value.param == "reasoning_effort"


def test_what_a_client_says_of_the_template_counts_before_the_effort() -> None:
    user = [chat_message("user", "x", None)]
    kwargs = {"enable_thinking": True}
    assert rendered("{{ enable_thinking }}", user, reasoning_effort="none", kwargs=kwargs) == "True"


@pytest.mark.parametrize(
    ("template", "tools", "reasoning", "form"),
    [
        ("{{ messages }}", "hermes", "", "hermes"),
        ("<tool_call>\n{\"name\": <function-name>", "hermes", "", "hermes"),
        ("<tool_call> {{ '<think>\n' + reasoning_content + '</think>' }}", "hermes", "think", "hermes"),
        ("<|start_header_id|> Environment: ipython \"parameters\"", "llama3_json", "", "llama3_json"),
        ("<|python_tag|>", "llama3_json", "", "llama3_json"),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS] [", "mistral", "", "mistral_array"),
        ("[TOOL_CALLS] name [ARGS]", "mistral", "", "mistral"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json <think>", "deepseek", "think",
         "deepseek_v3"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜> </think>", "deepseek", "think", "deepseek"),
        ("<|start|>assistant<|channel|>analysis", "harmony", "harmony", "harmony"),
    ],
)  # fmt: skip
def test_parsers_are_chosen_by_the_template(template: str, tools: str, reasoning: str, form: str) -> None:
    assert Dialect.of(template) == Dialect(tools, reasoning, FORMS[form])


def test_a_model_whose_template_refuses_several_calls_makes_one() -> None:
    dialect = Dialect.of(LLAMA_3)
    use = ToolUse((Tool("f"),), "required")
    spec = RequestSpec(ChatPrompt(()), tools=use)
    for one, each in ((True, dialect), (False, Dialect())):
        form = format_of(spec, each, "")
        guide = guide_of(spec, each, form)
        assert form is not None and form.is_single == one
        assert guide is not None and guide.calls == replace(use, is_single=one)


def test_a_result_has_the_name_of_the_function_that_was_called() -> None:
    assert [message.get("name") for message in named_results(TALK)] == [None, None, "weather"]
    stated = named_results([TALK[1], chat_message("tool", "x", "other", tool_call_id="c1")])
    assert stated[1]["name"] == "other"


def test_the_operator_may_choose_other_parsers_or_none() -> None:
    assert Dialect.of("<tool_call><think>", "mistral", "none") == Dialect("mistral", "", FORMS["mistral_array"])
    assert Dialect.of("<tool_call>", "none").tools == ""
    assert Dialect.of(None) == Dialect()


@pytest.mark.parametrize(
    ("end", "thinking"),
    [("assistant\n<think>\n", Thinking.OPEN), ("<think>\n\n</think>\n\n", Thinking.CLOSED), ("n\n", Thinking.UNKNOWN)],
)
def test_the_end_of_the_prompt_says_whether_the_model_thinks_already(end: str, thinking: Thinking) -> None:
    assert thinking_of(end) is thinking
