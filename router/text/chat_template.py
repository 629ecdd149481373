"""Renders a model's chat template the way transformers does, without transformers. No IO but the clock.

The template is the operator's; it still runs sandboxed. What a client sends must never turn into control
tokens, so every special token inside client text is disguised with private-use characters before rendering
(`SpecialTokenEscapes`), and the tokenizer restores it after it has seen which special tokens the template itself wrote.
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.values.errors import InvalidRequest
from router.text.calls.default_format import in_plain_messages

Message = dict[str, Any]
# Private-use characters: no tokenizer or template gives them a meaning.
_PRIVATE_USE = range(0xE000, 0xF900)
_KNOWS_NONE = re.compile(r"""content['"]?\]?\s+is\s+none""")


def chat_message(
    role: str,
    content: str | None,
    name: str | None,
    reasoning: str | None = None,
    tool_calls: Sequence[Mapping[str, Any]] = (),
    tool_call_id: str | None = None,
) -> Message:
    """A message for a template. Templates know "system" where OpenAI says "developer" by now.

    What the model thought before an earlier answer has two names, and templates read the one or the other. `content`
    None: there is nothing but calls, whose arguments are objects here.
    """
    optional = {
        "name": name,
        "reasoning": reasoning,
        "reasoning_content": reasoning,
        "tool_calls": list(tool_calls),
        "tool_call_id": tool_call_id,
    }
    stated = {key: value for key, value in optional.items() if value}
    return {"role": "system" if role == "developer" else role, "content": content, **stated}


class ChatTemplate:
    """A compiled template. Rendering is a pure function of its arguments (but for `strftime_now`)."""

    def __init__(self, source: str, special_tokens: Mapping[str, str | list[str]]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._template = environment.from_string(source)
        self.source = source
        self.names = meta.find_undeclared_variables(environment.parse(source))
        self._special_tokens = dict(special_tokens)
        # That a message has no content. Others would write "None".
        self._knows_none = _KNOWS_NONE.search(source) is not None

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        kwargs: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The prompt's text. Raises InvalidRequest when the template refuses the messages, or does not read a kwarg.

        For a template that knows no tools these are described in the system message.
        """
        if unread := sorted(kwargs.keys() - self.names):
            message = f"chat_template_kwargs: the model's chat template does not read {unread[0][:64]!r}"
            raise InvalidRequest(message, param="chat_template_kwargs")
        names = {**self._special_tokens, **kwargs, "add_generation_prompt": add_generation_prompt}
        try:
            if self._knows_none:
                with suppress(TemplateError, TypeError):  # some look into it all the same
                    return self._rendered(messages, None, tools, names)
            return self._rendered(messages, "", tools, names)
        except SecurityError as error:
            raise InvalidRequest("the chat template does something forbidden", param="messages") from error
        except _Refused as error:
            raise InvalidRequest(f"the chat template refuses these messages: {error}", param="messages") from error
        except (TemplateError, TypeError, ValueError) as error:
            raise InvalidRequest("the chat template cannot render these messages", param="messages") from error

    def _rendered(
        self,
        messages: Sequence[Message],
        no_content: str | None,
        tools: Sequence[Mapping[str, Any]],
        names: Mapping[str, Any],
    ) -> str:
        """`no_content` stands where a message has none."""
        contents = [message.get("content") for message in messages]
        shown = [
            {**message, "content": no_content if content is None else content}
            for message, content in zip(messages, contents, strict=True)
        ]
        if "tools" not in self.names:
            shown = in_plain_messages(shown, tools)
        return self._template.render(**names, messages=shown, tools=list(tools) or None, documents=None)


class SpecialTokenEscapes:
    """Hides special tokens in client text. One per request: it picks characters that the text does not use."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern
        self._char_to_private: dict[str, str] = {}
        self._used: set[str] = set()

    @property
    def is_empty(self) -> bool:
        """True when no special token has been found so far."""
        return not self._char_to_private

    def reserve(self, text: str) -> None:
        """Never escapes with a character of `text`. Call for all of a request's text first."""
        if not text.isascii():
            self._used.update(text)

    def hide(self, text: str) -> str:
        """`text` without any special token: the first character of each is replaced."""
        while self._pattern.search(text):  # overlapping tokens appear one after the other
            text = self._pattern.sub(lambda found: self._private(found[0][0]) + found[0][1:], text)
        return text

    def restore(self, text: str) -> str:
        """The inverse of `hide`, for any part of the rendered text."""
        return text.translate({ord(private): char for char, private in self._char_to_private.items()})

    def _private(self, char: str) -> str:
        if char not in self._char_to_private:
            self._char_to_private[char] = self._unused()
        return self._char_to_private[char]

    def _unused(self) -> str:
        for code in _PRIVATE_USE:
            if (char := chr(code)) not in self._used:
                self._used.add(char)
                return char
        raise InvalidRequest("the messages use every private-use character", param="messages")


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks what the assistant wrote, for training; here it only passes."""

    tags = {"generation"}  # noqa: RUF012  (the base class declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Refused(Exception):
    """The template called raise_exception; its message is the operator's text."""


def _raise_exception(message: str) -> NoReturn:
    raise _Refused(str(message)[:200])


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
