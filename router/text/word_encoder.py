"""Text to token ids word by word, with a cache of words: what a tokenizer gives, several times sooner. No IO.

Byte-level BPE cuts text before it merges anything, and a space after anything but white space is always such a cut:
what stands on its two sides is encoded independently. So the ids of a text are those of its words in a row, and most
words have been seen before. A tokenizer that is not known to cut there encodes whole texts.
"""

import json
from collections.abc import Sequence
from itertools import chain, dropwhile
from typing import Any

from tokenizers import Tokenizer

from common.checkpoint.gguf_pre_tokenizers import GPT2, LLAMA3, QWEN2

MAX_WORDS = 1 << 16
# Expressions none of which takes a space in, except as the first character of a match.
CUTTING = (GPT2, LLAMA3, QWEN2)
DIGIT = r"\p{N}"
# Longer ones rarely come again, and what clients send must not fill the memory: 70 MB at most.
MAX_WORD_LENGTH = 64
MAX_WORD_TOKENS = 16


class WordEncoder:
    """Encodes without special tokens but those that the text writes. Owns the cache; any thread may call."""

    def __init__(self, tokenizer: Tokenizer, max_words: int = MAX_WORDS) -> None:
        self._tokenizer = tokenizer
        self._max_words = max_words
        self._is_separable = is_separable(tokenizer)
        # By `_key`. Tuples: lists would be looked through by every full garbage collection.
        self._ids: dict[str, tuple[int, ...]] = {}

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`."""
        if not self._is_separable or not text:
            return list(self._encode([text])[0])
        first, *rest = text.split(" ")
        try:
            return [*self._ids[_key(first)], *chain.from_iterable(map(self._ids.__getitem__, rest))]
        except KeyError:
            words = [first, *[" " + word for word in rest]]
            return list(chain.from_iterable(self._look_up(_joined(words))))

    def _look_up(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        found = {word: self._ids.get(_key(word)) for word in words}
        missing = [word for word, ids in found.items() if ids is None]
        new = dict(zip(missing, self._encode(missing), strict=True))
        self._keep({_key(word): ids for word, ids in new.items() if _is_worth_keeping(word, ids)})
        return [found[word] or new[word] for word in words]

    def _keep(self, new: dict[str, tuple[int, ...]]) -> None:
        """A full cache starts over: to keep an order would cost every look-up."""
        if len(self._ids) + len(new) > self._max_words:
            self._ids = {}
        self._ids.update(new)

    def _encode(self, texts: list[str]) -> list[tuple[int, ...]]:
        """The fast call does not count the characters of every token; it exists for batches only."""
        return [tuple(each.ids) for each in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def is_separable(tokenizer: Tokenizer) -> bool:
    """Whether a space after anything but white space always cuts, by what the tokenizer says of itself."""
    parts: dict[str, Any] = json.loads(tokenizer.to_str())
    steps = _steps(parts["pre_tokenizer"])
    return (
        (parts["model"]["type"], parts["model"].get("dropout")) == ("BPE", None)
        and (parts["normalizer"] or {"type": "NFC"})["type"] == "NFC"
        and all(_cuts(step) or _is_local(step) for step in steps)
        and _cuts_text(steps)
        and all(_stands_alone(token) for token in parts["added_tokens"])
    )


def _steps(pre_tokenizer: dict[str, Any] | None) -> list[dict[str, Any]]:
    if pre_tokenizer is None:
        return []
    return pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]


def _cuts(step: dict[str, Any]) -> bool:
    """Whether the step cuts before every space."""
    if step["type"] == "ByteLevel":
        return bool(step["use_regex"]) and not step["add_prefix_space"]
    is_known = step["type"] == "Split" and step["pattern"].get("Regex") in CUTTING
    return is_known and step["behavior"] == "Isolated" and not step["invert"]


def _cuts_text(steps: list[dict[str, Any]]) -> bool:
    """Whether the cut is made while a space is one: as a byte of the alphabet it counts as a letter."""
    return next(map(_cuts, dropwhile(_is_digits, steps)), False)


def _is_local(step: dict[str, Any]) -> bool:
    """Does not look across a space."""
    return _is_digits(step) or (step["type"] == "ByteLevel" and not step["add_prefix_space"])


def _is_digits(step: dict[str, Any]) -> bool:
    return bool(step["type"] == "Digits" or (step["type"] == "Split" and step["pattern"].get("Regex") == DIGIT))


def _stands_alone(token: dict[str, Any]) -> bool:
    """An added token is found before the text is cut: it must neither hold a cut nor take one in."""
    return " " not in token["content"] and not (token["lstrip"] or token["rstrip"] or token["single_word"])


def _key(word: str) -> str:
    """A word in the cache: without the space before it, as splitting leaves it. One without a space, the first of a
    text, gets one behind it, where no kept word has any."""
    return word[1:] if word.startswith(" ") else word + " "


def _is_whole(word: str) -> bool:
    """Ends where a cut may follow."""
    return bool(word) and not word[-1].isspace()


def _is_worth_keeping(word: str, ids: Sequence[int]) -> bool:
    return _is_whole(word) and len(word) <= MAX_WORD_LENGTH and len(ids) <= MAX_WORD_TOKENS


def _joined(words: Sequence[str]) -> list[str]:
    """Undo the cuts after white space: those spaces belong to what is before them."""
    whole: list[str] = []
    parts: list[str] = []
    for word in words:
        parts.append(word)
        if _is_whole(word):
            whole.append("".join(parts))
            parts = []
    return [*whole, "".join(parts)] if parts else whole
