"""Text and bytes of single tokens. Pure: no IO.

One token need not be whole characters: "é" may be two tokens of one byte each. Logprobs show such
a token as `bytes:\\xc3`, with its exact bytes beside it.
"""

import codecs
import json
import re
from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class TokenTexts:
    """Token id -> (text, bytes), computed once per id."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._is_byte_level = _uses_byte_level(tokenizer)
        self.special_ids = {idx for idx, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._cache: dict[int, tuple[str, bytes]] = {}

    def text(self, token_id: int) -> str:
        """What to show for the token; never holds U+FFFD in place of an incomplete character."""
        return self._entry(token_id)[0]

    def raw(self, token_id: int) -> bytes:
        """The token's exact bytes."""
        return self._entry(token_id)[1]

    def ids_of(self, texts: Iterable[str]) -> frozenset[int]:
        """Of those of `texts` that are special tokens."""
        found = (self.tokenizer.token_to_id(text) for text in texts)
        return frozenset(token_id for token_id in found if token_id in self.special_ids)

    def num_unfinished(self, token_ids: Sequence[int]) -> int:
        """Bytes at the end of these tokens, three at most, that are the beginning of a character and not all of it."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        decoder.decode(b"".join(map(self.raw, token_ids)))
        return len(decoder.getstate()[0])

    def _entry(self, token_id: int) -> tuple[str, bytes]:
        entry = self._cache.get(token_id)
        if entry is None:
            raw = self._bytes(token_id)
            entry = self._cache[token_id] = (_shown(raw), raw)
        return entry

    def _bytes(self, token_id: int) -> bytes:
        piece = self.tokenizer.id_to_token(token_id)
        if piece is None:  # the model's vocabulary may be padded beyond the tokenizer's
            return b""
        if token_id in self.special_ids:
            return piece.encode()
        if self._is_byte_level:
            return b"".join(_BYTE_OF_CHAR.get(char) or char.encode() for char in piece)
        byte = _BYTE_TOKEN.fullmatch(piece)
        return bytes([int(byte[1], 16)]) if byte else piece.replace("\u2581", " ").encode()


def _shown(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _uses_byte_level(tokenizer: Tokenizer) -> bool:
    decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
    return any(part.get("type") == "ByteLevel" for part in [decoder, *decoder.get("decoders", [])])


def _byte_of_char() -> dict[str, bytes]:
    """The inverse of GPT-2's map from bytes to printable characters."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    chars = {byte: chr(byte) for byte in printable} | {byte: chr(256 + idx) for idx, byte in enumerate(others)}
    return {char: bytes([byte]) for byte, char in chars.items()}


_BYTE_OF_CHAR = _byte_of_char()
