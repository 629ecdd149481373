"""Text to token ids and back, for prompts. Owns nothing mutable: one object serves all threads.

Truncation and padding are never set on the shared `tokenizers.Tokenizer`: it would be a race. A second copy of it
reads special tokens as plain text; it encodes what clients wrote when that holds special tokens.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jinja2.exceptions import TemplateError
from tokenizers import Encoding, Tokenizer

from common.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from common.values.errors import InvalidRequest, Unsupported
from router.text.chat_template import ChatTemplate, Message, SpecialTokenEscapes
from router.text.word_encoder import WordEncoder

_NO_KWARGS: Mapping[str, Any] = MappingProxyType({})
# Of templates that know only whether to think: Qwen's and others', DeepSeek's.
_THINKING_SWITCHES = ("enable_thinking", "thinking")


def check_model(path: Path | str) -> Checkpoint:
    """Read all that a router and a worker will need of a model but the weights themselves, whose sizes are compared.

    Raises CheckpointError with the file and what to do. For those who start others, before they do.
    """
    checkpoint = open_checkpoint(path)
    PromptTokenizer.of(checkpoint)
    return checkpoint


class PromptTokenizer:
    """Encodes prompts and chats as the model expects them; decodes ids."""

    def __init__(self, tokenizer: Tokenizer, chat_template: ChatTemplate | None = None) -> None:
        self.tokenizer = tokenizer
        plain = Tokenizer.from_str(tokenizer.to_str())
        plain.encode_special_tokens = True
        self._words, self._plain_words = WordEncoder(tokenizer), WordEncoder(plain)
        self._chat_template = chat_template
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = {idx for idx, token in added.items() if token.special}
        self._special_pattern = _any_of([added[idx].content for idx in self._special_ids])
        self._prefix_ids, self._suffix_ids = _around(tokenizer.encode("a", add_special_tokens=True))

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "PromptTokenizer":
        """The tokenizer and the template of a model. Raises CheckpointError when one of them is damaged."""
        source = checkpoint.chat_template
        try:
            template = ChatTemplate(source, checkpoint.special_tokens) if source else None
        except TemplateError as error:
            raise CheckpointError(f"{checkpoint.path}: the chat template cannot be compiled: {error}") from error
        return cls(checkpoint.tokenizer(), template)

    @property
    def vocab_size(self) -> int:
        return int(self.tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a raw prompt. The text may write special tokens; a BOS it starts with is not doubled."""
        ids = self._words.encode(text)
        if not add_special_tokens:
            return ids
        has_prefix = ids[: len(self._prefix_ids)] == self._prefix_ids
        return [*(() if has_prefix else self._prefix_ids), *ids, *self._suffix_ids]

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, Any] = _NO_KWARGS,
        tools: Sequence[Mapping[str, Any]] = (),
        reasoning_effort: str | None = None,
    ) -> list[int]:
        """Token ids of a conversation. Special tokens come from the template only, never from a message."""
        template = self._chat_template
        if template is None:
            raise Unsupported("this model has no chat template; use completions", param="messages")
        if reasoning_effort is not None:
            kwargs = {**_effort(reasoning_effort, template.names), **kwargs}
        escapes = self._escapes([*messages, *tools], kwargs)
        hidden, hidden_tools = (_map_strings(list(values), escapes.hide) for values in (messages, tools))
        hidden_kwargs = {key: _map_strings(value, escapes.hide) for key, value in kwargs.items()}
        text = template.render(
            hidden, add_generation_prompt=add_generation_prompt, kwargs=hidden_kwargs, tools=hidden_tools
        )
        if escapes.is_empty:
            return self._words.encode(text)
        return self._encode_escaped(text, self.tokenizer.encode(text, add_special_tokens=False), escapes)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of whole sequences; streams use `router.text`."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def _escapes(self, values: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any]) -> SpecialTokenEscapes:
        escapes = SpecialTokenEscapes(self._special_pattern)
        for text in strings_in([*values, kwargs]):
            escapes.reserve(text)
        return escapes

    def _encode_escaped(self, text: str, encoding: Encoding, escapes: SpecialTokenEscapes) -> list[int]:
        """Keep the template's special tokens; encode what stands between them as plain text, undisguised."""
        ids: list[int] = []
        position = 0
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id in self._special_ids:
                ids += self._encode_plain(escapes.restore(text[position:start]))
                ids.append(token_id)
                position = end
        return ids + self._encode_plain(escapes.restore(text[position:]))

    def _encode_plain(self, text: str) -> list[int]:
        return self._plain_words.encode(text) if text else []


def _effort(effort: str, names: Collection[str]) -> dict[str, Any]:
    """How much to think, in the words of a template that reads `names`. Raises Unsupported where it reads none."""
    if "reasoning_effort" in names:
        return {"reasoning_effort": effort}
    for name in _THINKING_SWITCHES:
        if name in names:
            return {name: effort != "none"}
    if effort == "none":
        return {}
    raise Unsupported("reasoning_effort: the model's chat template does not read it", param="reasoning_effort")


def _around(encoding: Encoding) -> tuple[list[int], list[int]]:
    """What the tokenizer adds before and after a text."""
    mask = encoding.special_tokens_mask
    return encoding.ids[: mask.index(0)], encoding.ids[len(mask) - mask[::-1].index(0) :]


def require_encodable(text: str, param: str) -> None:
    """Raise when `text` holds half a surrogate pair: no UTF-8 text can."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{param} holds a lone surrogate (position {error.start})", param=param) from error


def _any_of(texts: Sequence[str]) -> re.Pattern[str]:
    """Matches any of `texts`, the longest first; nothing when there are none."""
    longest_first = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def strings_in(value: Any) -> Iterator[str]:
    """Every string in `value`, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from chain.from_iterable(map(strings_in, [*value.keys(), *value.values()]))
    elif isinstance(value, list):
        yield from chain.from_iterable(map(strings_in, value))


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """`value` with `change` applied to every string in it, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map_strings(key, change): _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_map_strings(item, change) for item in value]
    return value
