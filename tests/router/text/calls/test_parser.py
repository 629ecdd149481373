"""Answers of every family are told apart as they come, the same however they are cut; nothing of them is lost."""

import json
import random
from typing import get_args

import pytest

from common.values.config import ReasoningParser, ToolParser
from router.text.calls.forms import ARGUMENTS as ARGUMENTS_HOLE
from router.text.calls.forms import FORMS, NAME
from router.text.calls.parser import FAMILIES, REASONING_PARSERS, TOOL_PARSERS, Format, Thinking
from router.text.calls.reader import Kind
from tests.router.text.calls.answers import ANSWERS, ARGUMENTS, TEXT, Answer, parsed, summed

BY_NAME = pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer.name)
BOTH = pytest.mark.parametrize("is_whole", [False, True], ids=["streamed", "whole"])


def cuttings(text: str, num: int = 20) -> list[list[str]]:
    """Whole, by characters, in two at many places, and at random."""
    rng = random.Random(5)
    found = [[text], list(text), *([text[:at], text[at:]] for at in range(1, len(text), 3))]
    for _ in range(num):
        places = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.randint(1, 12))))
        found.append([text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)])
    return found


@BY_NAME
@BOTH
def test_an_answer_is_told_apart_however_it_is_cut(answer: Answer, is_whole: bool) -> None:
    for parts in cuttings(answer.text):
        content, reasoning, calls = summed(parsed(answer.form(is_whole=is_whole), parts))
        assert (content, reasoning) == (answer.content, answer.reasoning), parts
        assert [(name, json.loads(str(text)), is_complete) for name, text, is_complete in calls] == [
            (name, arguments, True) for name, arguments in answer.calls
        ]


@BY_NAME
@BOTH
def test_a_truncated_answer_is_the_same_however_it_is_cut_and_its_arguments_are_the_beginning_of_json(
    answer: Answer, is_whole: bool
) -> None:
    form = answer.form(is_whole=is_whole)
    for end in range(0, len(answer.text), 3):
        text = answer.text[:end]
        for is_cut in (True, False):
            expected = summed(parsed(form, [text], is_cut=is_cut))
            assert summed(parsed(form, list(text), is_cut=is_cut)) == expected, text
            for (name, arguments, is_complete), (right_name, right) in zip(expected[2], answer.calls, strict=False):
                assert name == right_name
                assert not is_complete or json.loads(str(arguments)) == right
            if is_whole and not is_cut:
                assert all(is_complete for _, _, is_complete in expected[2]), text


@pytest.mark.parametrize("answer", [each for each in ANSWERS if not each.is_late], ids=lambda answer: answer.name)
def test_arguments_come_while_they_are_written(answer: Answer) -> None:
    """In pieces that are many, as the characters are."""
    kinds = [piece.kind for piece in parsed(answer.form(is_whole=False), list(answer.text))]
    assert kinds.count(Kind.NAME) == len(answer.calls)
    assert kinds.count(Kind.ARGUMENTS) >= sum(len(json.dumps(each)) // 2 for _, each in answer.calls)


MALFORMED = (
    '<tool_call>{"name": "f", "arguments": {a: 1}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": 01}}</tool_call> more',
    '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
    '<tool_call>{"arguments": {}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": "f", "arguments": "[1]"}</tool_call>',
    '<tool_call>{"name": "f", "name": "g", "arguments": {}}</tool_call>',
    "<tool_call>f(1)</tool_call>",
    "a <tool_call>",
    '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
)


@pytest.mark.parametrize("text", MALFORMED)
def test_a_malformed_call_is_content_and_all_of_it(text: str) -> None:
    form = Format("hermes", is_whole=True)
    for parts in cuttings(text, 5):
        assert summed(parsed(form, parts)) == (text, "", [])


@pytest.mark.parametrize("text", MALFORMED)
def test_what_is_left_of_a_malformed_call_that_was_begun_is_content_however_it_is_cut(text: str) -> None:
    form = Format("hermes")
    content, _, calls = expected = summed(parsed(form, [text]))
    assert not any(is_complete for _, _, is_complete in calls)
    assert text.endswith(content) and content
    begun = "".join(str(arguments) for _, arguments, _ in calls)
    assert begun in text.removesuffix(content)
    for parts in cuttings(text, 5):
        assert summed(parsed(form, parts)) == expected


def test_a_sound_call_stands_between_malformed_ones() -> None:
    sound = f'<tool_call>{{"name": "f", "arguments": {TEXT}}}</tool_call>'
    text = f"{MALFORMED[0]}{sound}{MALFORMED[7]}"
    content, _, calls = summed(parsed(Format("hermes", is_whole=True), [text]))
    assert content == MALFORMED[0] + MALFORMED[7]
    assert [(name, json.loads(str(arguments))) for name, arguments, _ in calls] == [("f", ARGUMENTS)]


WORDS = (
    *("{", "}", "[", "]", '"', "\\", ",", ":", " ", "\n", "name", '"name"', '"f"', "arguments", "x", "1", "null", ";"),
    *("functions.f", " to=functions.f", "```json\n", "function", "analysis"),
)


@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_no_text_makes_a_parser_fail_or_depend_on_the_cut(name: str) -> None:
    rng = random.Random(3)
    words = [*WORDS, *sorted(Format(name, "think").tokens)]
    for _ in range(300):
        text = "".join(rng.choice(words) for _ in range(rng.randint(1, 25)))
        form = Format(name, "think", rng.choice(list(Thinking)), frozenset({"f"}), rng.random() < 0.5)
        for is_cut in (True, False):
            at_once = summed(parsed(form, [text], is_cut=is_cut))
            assert summed(parsed(form, list(text), is_cut=is_cut)) == at_once, text


@pytest.mark.parametrize("name", FORMS)
def test_what_guided_calls_are_written_in_is_what_the_parser_reads(name: str) -> None:
    form = FORMS[name]
    calls = [form.call.replace(NAME, each).replace(ARGUMENTS_HOLE, TEXT) for each in ("f", "g")]
    if name == "harmony":
        calls = calls[:1]
    text = form.begin + form.between.join(calls) + form.end
    tools = "mistral" if name == "mistral_array" else "deepseek" if name == "deepseek_v3" else name
    content, _, found = summed(parsed(Format(tools, names=frozenset({"f", "g"})), list(text)))
    assert content == ""
    assert [(each, json.loads(str(arguments))) for each, arguments, _ in found] == [
        (each, ARGUMENTS) for each in "fg"[: len(calls)]
    ]


def test_the_settings_name_the_parsers_that_there_are() -> None:
    assert set(get_args(ToolParser)) == {"auto", "none", *TOOL_PARSERS}
    assert set(get_args(ReasoningParser)) == {"auto", "none", *REASONING_PARSERS}
    assert set(FAMILIES) < set(FORMS)
