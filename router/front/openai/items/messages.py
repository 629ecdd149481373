"""The items of `input` as the messages that chat templates know. Pure: no IO.

An assistant's turn is one message for a template and several items here: what it thought, said and called.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from common.values.errors import InvalidRequest, Unsupported
from router.front.openai.fields import refuse_unsupported
from router.front.openai.items.requests import (
    ITEMS,
    CallItem,
    CallOutputItem,
    ContentItem,
    InputItem,
    MessageItem,
    ReasoningItem,
)
from router.front.openai.json_body import converted
from router.front.openai.prompts import named_results
from router.front.openai.tools import CallFunctionBody, call_of
from router.request import limits
from router.text.chat_template import Message, chat_message

ROLES = ("system", "developer", "user", "assistant")
_TEXTS = ("input_text", "output_text", "reasoning_text", "text")


def messages_of(stated: str | Sequence[Any], instructions: str | None) -> tuple[Message, ...]:
    """`instructions` first. Raises InvalidRequest when there is something other than text and calls."""
    before = [] if instructions is None else [chat_message("system", instructions, None)]
    if isinstance(stated, str):
        return (*before, chat_message("user", stated, None))
    if not stated:
        raise InvalidRequest("input is empty", param="input")
    if len(stated) > limits.MAX_MESSAGES:
        raise InvalidRequest(f"input holds more than {limits.MAX_MESSAGES} items", param="input")
    conversation = _Conversation(before)
    for idx, item in enumerate(stated):
        conversation.add(_item(item, f"input[{idx}]"), f"input[{idx}]")
    conversation.end_turn()
    return named_results(conversation.messages)


def _item(stated: object, param: str) -> InputItem:
    """A message may leave its type out."""
    kind = stated.get("type", "message") if isinstance(stated, dict) else "message"
    item_type = ITEMS.get(kind) if isinstance(kind, str) else None
    if item_type is None:
        reason = "nothing is kept here: send the item itself" if kind == "item_reference" else "not supported yet"
        raise Unsupported(f"{param}.type: {reason}", param=f"{param}.type")
    item = converted(stated, item_type, param)
    refuse_unsupported(item, f"{param}.")
    return item


@dataclass(slots=True)
class _Turn:
    """What the assistant did so far, in the order of a message."""

    reasoning: str | None = None
    content: str | None = None
    calls: list[dict[str, Any]] = field(default_factory=list)


class _Conversation:
    def __init__(self, messages: list[Message]) -> None:
        self.messages = messages
        self._turn = _Turn()

    def add(self, item: InputItem, param: str) -> None:
        match item:
            case ReasoningItem():
                self._end_turn_after(self._turn.reasoning, self._turn.content, self._turn.calls)
                self._turn.reasoning = _text(item.content or "", f"{param}.content")
            case MessageItem(role="assistant"):
                self._end_turn_after(self._turn.content, self._turn.calls)
                self._turn.content = _text(item.content, f"{param}.content")
            case CallItem():
                function = CallFunctionBody(item.name, item.arguments)
                self._turn.calls.append(call_of(function, item.call_id, f"{param}.arguments"))
            case CallOutputItem():
                self.end_turn()
                output = _text(item.output, f"{param}.output")
                self.messages.append(chat_message("tool", output, None, tool_call_id=item.call_id))
            case MessageItem():
                self.end_turn()
                if item.role not in ROLES:
                    raise InvalidRequest(f"{param}.role must be one of {', '.join(ROLES)}", param=f"{param}.role")
                self.messages.append(chat_message(item.role, _text(item.content, f"{param}.content"), None))

    def end_turn(self) -> None:
        turn, self._turn = self._turn, _Turn()
        if turn != _Turn():
            content = turn.content if turn.content is not None or turn.calls else ""
            self.messages.append(chat_message("assistant", content, None, turn.reasoning, turn.calls))

    def _end_turn_after(self, *parts: object) -> None:
        """The turn has one of these already, or what comes after it."""
        if any(part not in (None, []) for part in parts):
            self.end_turn()


def _text(content: str | Sequence[ContentItem], param: str) -> str:
    if isinstance(content, str):
        return content
    for idx, part in enumerate(content):
        where = f"{param}[{idx}]"
        if part.type not in _TEXTS:
            raise Unsupported(f"{where}.type: only text is supported yet", param=f"{where}.type")
        refuse_unsupported(part, f"{where}.")
        if part.text is None:
            raise InvalidRequest(f"{where}.text is missing", param=f"{where}.text")
    return "".join(part.text or "" for part in content)
