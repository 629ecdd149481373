"""Grammars of calls: what they let through is what the parser reads, in every family's form, and nothing else."""

import json
from functools import cache

import pytest
from tokenizers import AddedToken, Tokenizer

from common.guided import grammar
from common.guided.masks import Masks, guided_tokenizer
from router.text.calls.forms import ARGUMENTS, FORMS, NAME
from router.text.calls.harmony import CHANNEL, END, MESSAGE, START
from router.text.calls.lark import Calls, lark_of
from router.text.calls.parser import FAMILIES, HARMONY, THINK_BEGIN, THINK_END, Format, Thinking
from tests.router.text.calls.answers import parsed, summed
from tests.router.text.tokenizers_for_tests import EOS_ID, byte_tokenizer

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
PARTS = {"arguments_0": grammar.of_json_schema(SCHEMA), "arguments_1": grammar.of_json_object()}
FAMILY_OF = {"mistral_array": "mistral", "deepseek_v3": "deepseek"}


@cache
def tools(specials: tuple[str, ...]) -> tuple[Tokenizer, dict[str, int], Masks]:
    """A tokenizer in which `specials` are special tokens, their ids, and masks."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    special_ids = {token.content: idx for idx, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    return tokenizer, special_ids, Masks(guided_tokenizer(tokenizer, tokenizer.get_vocab_size(), [EOS_ID]))


def lets_through(
    text: str,
    name: str,
    specials: tuple[str, ...] = (),
    *,
    is_required: bool = True,
    is_single: bool = False,
    thinking: Thinking | None = None,
    answer: str = "",
) -> bool:
    """Whether a whole answer of `text` may be drawn, token by token."""
    tokenizer, special_ids, masks = tools(specials)
    calls = Calls(FORMS[name], ["f", "g"], is_required, is_single)
    lark = lark_of(calls, thinking, special_ids, has_answer=bool(answer))
    combined = grammar.combined(lark, PARTS | ({"answer": answer} if answer else {}))
    grammar.check(combined)
    ids = (*tokenizer.encode(text, add_special_tokens=False).ids, EOS_ID)
    return all(masks.allowed(combined, tuple(ids[:at]))[token_id] for at, token_id in enumerate(ids))


def written(name: str, *arguments: str) -> str:
    form = FORMS[name]
    calls = [form.call.replace(NAME, "f").replace(ARGUMENTS, text) for text in arguments]
    return form.begin + form.between.join(calls) + form.end


def specials_of(name: str) -> tuple[str, ...]:
    return tuple(sorted(Format(FAMILY_OF.get(name, name)).tokens))


EVERY_FORM = pytest.mark.parametrize("name", FORMS)
MANY = pytest.mark.parametrize("name", [name for name in FORMS if name != HARMONY])


@EVERY_FORM
def test_a_required_call_follows_its_schema_whether_markers_are_tokens_or_text(name: str) -> None:
    for specials in ((), specials_of(name)):
        assert lets_through(written(name, '{"a": 1}'), name, specials)
        assert not lets_through(written(name, '{"a": "x"}'), name, specials)
        assert not lets_through(written(name, "{}"), name, specials)
        assert not lets_through(written(name, '{"a": 1}').replace("f", "h", 1), name, specials)
        assert not lets_through("No.", name, specials)


@EVERY_FORM
def test_what_is_let_through_is_read_as_calls(name: str) -> None:
    content, _, calls = summed(
        parsed(Format(FAMILY_OF.get(name, name), names=frozenset("fg")), [written(name, '{"a": 1}')])
    )
    assert (content, [(each, json.loads(str(text))) for each, text, _ in calls]) == ("", [("f", {"a": 1})])


@MANY
def test_several_calls_may_be_made_unless_one_is_wanted(name: str) -> None:
    two = written(name, '{"a": 1}', '{"a": -2}')
    assert lets_through(two, name, specials_of(name))
    assert not lets_through(two, name, specials_of(name), is_single=True)


@MANY
def test_beside_free_text_a_call_still_follows_its_schema(name: str) -> None:
    said = "" if name == "llama3_json" else "Hm. "
    for specials in ((), specials_of(name)):
        assert lets_through("Just {text}.", name, specials, is_required=False)
        assert lets_through(said + written(name, '{"a": 1}'), name, specials, is_required=False)
        assert not lets_through(said + written(name, '{"a": "x"}'), name, specials, is_required=False)


def test_messages_of_harmony_may_come_before_a_call_or_in_its_place() -> None:
    specials = specials_of(HARMONY)
    thought = f"{CHANNEL}analysis{MESSAGE}Hm.{END}{START}assistant"
    final = f"{CHANNEL}final{MESSAGE}Yes."
    assert lets_through(thought + written(HARMONY, '{"a": 1}'), HARMONY, specials)
    assert not lets_through(thought + written(HARMONY, '{"a": "x"}'), HARMONY, specials)
    assert not lets_through(thought + final, HARMONY, specials)
    assert lets_through(thought + final, HARMONY, specials, is_required=False)
    assert not lets_through(written(HARMONY, '{"a": "x"}'), HARMONY, specials, is_required=False)


@pytest.mark.parametrize("specials", [(), (THINK_BEGIN, THINK_END)], ids=["text", "tokens"])
def test_a_thought_may_come_before_where_the_prompt_has_not_ended_it(specials: tuple[str, ...]) -> None:
    call = written("hermes", '{"a": 1}')
    for thinking, right, wrong in (
        (Thinking.OPEN, f"Hm.</think>\n\n{call}", call),
        (Thinking.UNKNOWN, f"<think>Hm.</think>\n\n{call}", f"Hm.</think>{call}"),
        (Thinking.UNKNOWN, call, "<think>Hm.</think>No."),
        (Thinking.CLOSED, call, f"<think>Hm.</think>{call}"),
    ):
        assert lets_through(right, "hermes", specials, thinking=thinking)
        assert not lets_through(wrong, "hermes", specials, thinking=thinking)


def test_beside_a_constrained_answer_there_is_that_or_calls() -> None:
    answer = grammar.of_json_schema({"type": "array", "items": {"type": "boolean"}})
    assert lets_through("[true]", "hermes", is_required=False, answer=answer)
    assert lets_through(written("hermes", '{"a": 1}'), "hermes", is_required=False, answer=answer)
    assert not lets_through("[1]", "hermes", is_required=False, answer=answer)
    assert not lets_through("Hm.", "hermes", is_required=False, answer=answer)


def test_every_family_has_a_form() -> None:
    assert {FAMILY_OF.get(name, name) for name in FORMS} == {*FAMILIES, HARMONY}
