"""Tools for chat templates that know none: described in the system message, calls and results as plain text.

The form is Hermes', which most models have seen. Pure: no IO.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

_Message = Mapping[str, Any]
_INTRODUCTION = (
    "You can call functions. These are the functions, one JSON object on each line:\n<tools>\n{tools}\n</tools>\n"
    "To call one, answer with its name and its arguments as JSON between these marks, once for each call:\n"
    '<tool_call>\n{{"name": "the name", "arguments": {{"the parameter": "its value"}}}}\n</tool_call>'
)


def in_plain_messages(messages: Sequence[_Message], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same conversation in the roles system, user and assistant."""
    plain: list[dict[str, Any]] = []
    for is_result, turn in groupby(messages, lambda message: message["role"] == "tool"):
        group = list(turn)
        plain += [_results(group)] if is_result else map(_without_calls, group)
    return _introduced(plain, tools) if tools else plain


def _results(messages: Iterable[_Message]) -> dict[str, Any]:
    """All results of one turn: some templates want user and assistant to alternate."""
    texts = [f"<tool_response>\n{message['content'] or ''}\n</tool_response>" for message in messages]
    return {"role": "user", "content": "\n".join(texts)}


def _without_calls(message: _Message) -> dict[str, Any]:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    if not calls:
        return dict(message)
    texts = [json.dumps({"name": call["name"], "arguments": call["arguments"]}, ensure_ascii=False) for call in calls]
    written = [f"<tool_call>\n{text}\n</tool_call>" for text in texts]
    content = "\n".join([*filter(None, [message["content"]]), *written])
    return {key: value for key, value in message.items() if key != "tool_calls"} | {"content": content}


def _introduced(messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = _INTRODUCTION.format(tools=lines)
    first, rest = messages[:1], messages[1:]
    if first and first[0]["role"] == "system":
        return [first[0] | {"content": f"{first[0]['content']}\n\n{text}"}, *rest]
    return [{"role": "system", "content": text}, *messages]
