"""What an output is constrained to: from what a client stated to the grammar that workers get, checked and cached."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import msgspec
from llguidance import LLTokenizer
from tokenizers import Tokenizer

from common.guided import grammar
from common.guided.masks import guided_tokenizer
from common.values.errors import InvalidRequest

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


@dataclass(frozen=True, slots=True)
class Constraint:
    """As stated; `param` is the API's name of the field, for errors."""

    kind: Kind
    value: Any
    param: str


class Grammars:
    """Compiles constraints once each. Owns the cache and the library's tokenizer; of one event loop."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._parts = tokenizer, vocab_size, eos_token_ids
        self._checked: OrderedDict[tuple[Kind, bytes], str] = OrderedDict()

    async def grammar_of(self, constraint: Constraint | None) -> str:
        """The text for the workers, "" without a constraint. Raises InvalidRequest that says what cannot be enforced.

        A new one is compiled off the event loop.
        """
        if constraint is None:
            return ""
        try:
            key = constraint.kind, msgspec.json.encode(constraint.value)
        except (TypeError, RecursionError) as error:
            raise InvalidRequest(f"{constraint.param} is nested too deeply", param=constraint.param) from error
        text = self._checked.pop(key, None)
        if text is None:
            text = await asyncio.to_thread(self._compiled, constraint)
        self._checked[key] = text
        if len(self._checked) > MAX_CACHED:
            self._checked.popitem(last=False)
        return text

    def _compiled(self, constraint: Constraint) -> str:
        try:
            text = _GRAMMAR_OF[constraint.kind](constraint.value)
            grammar.check(text, self._tokenizer)
        except grammar.GrammarError as error:
            message = f"{constraint.param} cannot be enforced: {error}"
            raise InvalidRequest(message, param=constraint.param) from error
        return text

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        return guided_tokenizer(*self._parts)
