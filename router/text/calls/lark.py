"""The grammar of an answer that may or must hold calls, in llguidance's Lark. Pure: text in, text out.

Arguments are grammars of their own, `@arguments_0` and so on, and so is the answer that a client constrained,
`@answer`. Markers that are special tokens stand as their ids: as text no model writes them.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from router.text.calls.forms import ARGUMENTS, NAME, CallForm
from router.text.calls.harmony import CHANNEL, END, MESSAGE, START
from router.text.calls.parser import THINK_BEGIN, THINK_END, Thinking

_TEXT = "TEXT: /(.|\\n)*/"
# Llama writes calls as bare JSON: what begins otherwise is text.
_OTHER_TEXT = "OTHER_TEXT: /([^{ \\t\\r\\n](.|\\n)*)?/"


@dataclass(frozen=True, slots=True)
class Calls:
    """`names` in the order of their arguments' grammars."""

    form: CallForm
    names: Sequence[str]
    is_required: bool
    is_single: bool


def lark_of(calls: Calls | None, thinking: Thinking | None, special_ids: Mapping[str, int], *, has_answer: bool) -> str:
    """`thinking` None: the model does not think. Without `has_answer` what is no call is free text."""
    writer = _Writer(special_ids)
    if calls is not None and calls.form.trigger == CHANNEL:
        rules = writer.harmony(calls)
    else:
        rules = [*writer.thought(thinking), *writer.body(calls, has_answer=has_answer)]
    return "\n".join(["%llguidance {}", *rules, _TEXT, _OTHER_TEXT])


class _Writer:
    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self._special_ids = special_ids
        self._specials = re.compile(f"({'|'.join(map(re.escape, special_ids)) or '(?!)'})")

    def thought(self, thinking: Thinking | None) -> list[str]:
        """The rule `start`: a thought, where there may be one, and the body."""
        thought = f"(TEXT {self._text(THINK_END)})" if THINK_END in self._special_ids else "thought_end"
        rules = [f'thought_end[lazy]: TEXT "{THINK_END}"', "THOUGHT_SPACE: /[ \\n]{0,4}/"]
        match thinking:
            case Thinking.OPEN:
                return [f"start: {thought} THOUGHT_SPACE body", *rules]
            case Thinking.UNKNOWN:
                return [f"start: ({self._text(THINK_BEGIN)} {thought} THOUGHT_SPACE)? body", *rules]
        return ["start: body"]

    def body(self, calls: Calls | None, *, has_answer: bool) -> list[str]:
        if calls is None:
            return ["body: @answer"]
        if calls.is_required or has_answer:
            return ["body: calls" + (" | @answer" if has_answer else ""), *self._calls(calls, calls.form.begin)]
        trigger = calls.form.trigger
        if not trigger:
            return ["body: calls | OTHER_TEXT", *self._calls(calls, calls.form.begin)]
        rules = ["body: tag | TEXT" if calls.is_single else "body: tag* TEXT", *self._tag(trigger)]
        if calls.form.begin:
            return [*rules, *self._calls(calls, calls.form.begin.removeprefix(trigger))]
        return [*rules, "calls: call", *self._each(calls, trigger)]

    def harmony(self, calls: Calls) -> list[str]:
        """Messages one behind the other; the last is the call, where it must be one."""
        channel, message, turn = (self._text(text) for text in (CHANNEL, MESSAGE, END + START + "assistant"))
        thought = f'{channel} "analysis" {message} TEXT'
        told = f'{channel} ("final" | "commentary") {message} TEXT'
        last = "call" if calls.is_required else f"(call | {told})"
        return [f"start: ({thought} {turn})* {last}", *self._each(calls, "")]

    def _tag(self, trigger: str) -> list[str]:
        if trigger in self._special_ids:
            return [f"tag: TEXT {self._text(trigger)} calls"]
        return [f"trigger[lazy]: TEXT {self._text(trigger)}", "tag: trigger calls"]

    def _calls(self, calls: Calls, begin: str) -> list[str]:
        form = calls.form
        more = "" if calls.is_single else f"({self._text(form.between)} call)*"
        return [f"calls: {self._text(begin)} call {more} {self._text(form.end)}", *self._each(calls, "")]

    def _each(self, calls: Calls, passed: str) -> list[str]:
        """A rule for each function. `passed` is what of a call has been read."""
        text = calls.form.call.removeprefix(passed)
        numbers = range(len(calls.names))
        rules = [f"call_{idx}: {self._filled(text, name, idx)}" for idx, name in enumerate(calls.names)]
        return ["call: " + " | ".join(f"call_{idx}" for idx in numbers), *rules]

    def _filled(self, text: str, name: str, idx: int) -> str:
        filled = text.replace(NAME, name)
        before, after = filled.split(ARGUMENTS)
        return f"{self._text(before)} @arguments_{idx} {self._text(after)}"

    def _text(self, text: str) -> str:
        """Literals and, for special tokens, their ids."""
        parts = [part for part in self._specials.split(text) if part]
        return " ".join(
            f"<[{self._special_ids[part]}]>" if part in self._special_ids else json.dumps(part, ensure_ascii=False)
            for part in parts
        )
