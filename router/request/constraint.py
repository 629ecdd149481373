"""What an output is constrained to: from what a client stated to the grammar that workers get, checked and cached."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import msgspec
from llguidance import LLTokenizer
from tokenizers import Tokenizer

from common.guided import grammar
from common.guided.masks import guided_tokenizer
from common.values.errors import InvalidRequest
from router.text.calls.forms import CallForm
from router.text.calls.lark import Calls, lark_of
from router.text.calls.parser import Thinking
from router.text.calls.tools import Tool, ToolUse

MAX_CACHED = 256
Kind = Literal["json_schema", "json_object", "regex", "choice", "grammar", "structural_tag"]
_GRAMMAR_OF: Mapping[Kind, Callable[[Any], str]] = {
    "json_schema": grammar.of_json_schema,
    "json_object": lambda _: grammar.of_json_object(),
    "regex": grammar.of_regex,
    "choice": grammar.of_choice,
    "grammar": grammar.of_grammar,
    "structural_tag": grammar.of_structural_tags,
}


_ANY_ARGUMENTS = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Constraint:
    """As stated; `param` is the API's name of the field, for errors."""

    kind: Kind
    value: Any
    param: str


@dataclass(frozen=True, slots=True)
class Guide:
    """What an answer is held to: the client's own constraint, calls, or either of them.

    `form` is what calls are written in. `thinking`: a thought may come before, from where the prompt ends.
    """

    answer: Constraint | None = None
    calls: ToolUse | None = None
    form: CallForm | None = None
    thinking: Thinking | None = None

    @property
    def param(self) -> str:
        return "tools" if self.answer is None else self.answer.param

    @property
    def key(self) -> bytes:
        """Equal for two that become the same grammar."""
        answer = None if self.answer is None else (self.answer.kind, self.answer.value)
        calls = None
        if self.calls is not None and self.form is not None:
            tools = [(tool.name, tool.parameters, tool.is_strict) for tool in self.calls.callable_tools]
            calls = tools, self.calls.mode, self.calls.is_single, self.form.call
        try:
            return msgspec.json.encode((answer, calls, None if self.thinking is None else self.thinking.name))
        except (TypeError, RecursionError) as error:
            raise InvalidRequest(f"{self.param} is nested too deeply", param=self.param) from error


class Grammars:
    """Compiles guides once each. Owns the cache and the library's tokenizer; of one event loop."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._parts = tokenizer, vocab_size, eos_token_ids
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = {token.content: token_id for token_id, token in added.items() if token.special}
        self._checked: OrderedDict[bytes, str] = OrderedDict()

    async def grammar_of(self, guide: Guide | None) -> str:
        """The text for the workers, "" without a guide. Raises InvalidRequest that says what cannot be enforced.

        A new one is compiled off the event loop.
        """
        if guide is None:
            return ""
        key = guide.key
        text = self._checked.pop(key, None)
        if text is None:
            text = await asyncio.to_thread(self._compiled, guide)
        self._checked[key] = text
        if len(self._checked) > MAX_CACHED:
            self._checked.popitem(last=False)
        return text

    def _compiled(self, guide: Guide) -> str:
        arguments = [] if guide.calls is None else [_arguments(tool) for tool in guide.calls.callable_tools]
        with _explained(guide.param):
            answer = None if guide.answer is None else _GRAMMAR_OF[guide.answer.kind](guide.answer.value)
            text = self._joined(guide, arguments, answer)
            grammar.check(text, self._tokenizer)
        return text

    def _joined(self, guide: Guide, arguments: Sequence[str], answer: str | None) -> str:
        if answer is not None and guide.calls is None and guide.thinking in (None, Thinking.CLOSED):
            return answer
        calls = None
        if guide.calls is not None and guide.form is not None:
            names = [tool.name for tool in guide.calls.callable_tools]
            calls = Calls(guide.form, names, guide.calls.mode == "required", guide.calls.is_single)
        lark = lark_of(calls, guide.thinking, self._special_ids, has_answer=answer is not None)
        parts = {f"arguments_{idx}": text for idx, text in enumerate(arguments)}
        return grammar.combined(lark, parts if answer is None else parts | {"answer": answer})

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        return guided_tokenizer(*self._parts)


def _arguments(tool: Tool) -> str:
    """The grammar of a call's arguments. What cannot be enforced is refused of a strict tool, else any object goes."""
    schema = _ANY_ARGUMENTS if tool.parameters is None else _closed(tool.parameters)
    if not tool.is_strict:
        try:
            return _checked_schema(schema)
        except grammar.GrammarError:
            return _checked_schema(_ANY_ARGUMENTS)
    with _explained(tool.param):
        return _checked_schema(schema)


def _checked_schema(schema: Mapping[str, Any]) -> str:
    text = grammar.of_json_schema(schema)
    grammar.check(text)
    return text


def _closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """An argument that a function does not have is of no use, though its schema may not say so."""
    is_open = "additionalProperties" in schema or "properties" not in schema
    return {"type": "object", **schema} if is_open else {"type": "object", **schema, "additionalProperties": False}


@contextmanager
def _explained(param: str) -> Iterator[None]:
    """A grammar that cannot be used, as an error of the API's."""
    try:
        yield
    except grammar.GrammarError as error:
        raise InvalidRequest(f"{param} cannot be enforced: {error}", param=param) from error
