"""Follows one JSON value character by character, and knows where it ends and where it breaks. Pure: no IO."""

import re
from enum import Enum, auto

_SPACE = frozenset(" \t\n\r")
_HEX = frozenset("0123456789abcdefABCDEF")
_ESCAPED = frozenset('"\\/bfnrt')
_WORD_CHARS = frozenset("0123456789+-.eEtrufalsn")
_WORD_STARTS = frozenset("-0123456789tfn")
_WORD = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null")


class Malformed(Exception):
    """The text is not what its format wants here."""


class Status(Enum):
    MORE = auto()
    DONE = auto()  # the character was the value's last
    PAST = auto()  # the value had ended before the character


class _At(Enum):
    """What may come next."""

    VALUE = auto()
    VALUE_OR_END = auto()
    KEY = auto()
    KEY_OR_END = auto()
    COLON = auto()
    COMMA_OR_END = auto()
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    WORD = auto()


class JsonScan:
    """As strict as RFC 8259. What has been fed is a prefix of some JSON value, or `feed` raises Malformed.

    A number or a word is looked at whole, at its end.
    """

    def __init__(self) -> None:
        self._at = _At.VALUE
        self._closers: list[str] = []
        self._is_key = False
        self._word = ""
        self._num_hex = 0

    @property
    def is_in_string(self) -> bool:
        """Any character but a quote, a backslash or a control character goes on with it."""
        return self._at is _At.STRING

    def feed(self, char: str) -> Status:
        match self._at:
            case _At.STRING:
                return self._in_string(char)
            case _At.ESCAPE:
                self._escape(char)
            case _At.HEX:
                self._hex(char)
            case _At.WORD:
                return self._in_word(char)
            case _:
                return Status.MORE if char in _SPACE else self._between(char)
        return Status.MORE

    def _between(self, char: str) -> Status:
        at = self._at
        if at in (_At.COMMA_OR_END, _At.KEY_OR_END, _At.VALUE_OR_END) and char == (self._closers or [""])[-1]:
            self._closers.pop()
            return self._ended()
        if at in (_At.KEY, _At.KEY_OR_END) and char == '"':
            self._at, self._is_key = _At.STRING, True
        elif at is _At.COLON and char == ":":
            self._at = _At.VALUE
        elif at is _At.COMMA_OR_END and char == ",":
            self._at = _At.KEY if self._closers[-1] == "}" else _At.VALUE
        elif at in (_At.VALUE, _At.VALUE_OR_END):
            self._value(char)
        else:
            raise Malformed
        return Status.MORE

    def _value(self, char: str) -> None:
        if char == '"':
            self._at, self._is_key = _At.STRING, False
        elif char == "{":
            self._closers.append("}")
            self._at = _At.KEY_OR_END
        elif char == "[":
            self._closers.append("]")
            self._at = _At.VALUE_OR_END
        elif char in _WORD_STARTS:
            self._at, self._word = _At.WORD, char
        else:
            raise Malformed

    def _in_string(self, char: str) -> Status:
        if char == "\\":
            self._at = _At.ESCAPE
        elif char < " ":
            raise Malformed
        elif char == '"':
            if not self._is_key:
                return self._ended()
            self._at = _At.COLON
        return Status.MORE

    def _escape(self, char: str) -> None:
        if char == "u":
            self._at, self._num_hex = _At.HEX, 0
        elif char in _ESCAPED:
            self._at = _At.STRING
        else:
            raise Malformed

    def _hex(self, char: str) -> None:
        if char not in _HEX:
            raise Malformed
        self._num_hex += 1
        if self._num_hex == 4:
            self._at = _At.STRING

    def _in_word(self, char: str) -> Status:
        if char in _WORD_CHARS:
            self._word += char
            return Status.MORE
        if not _WORD.fullmatch(self._word):
            raise Malformed
        if self._ended() is Status.DONE:
            return Status.PAST
        return self.feed(char)

    def _ended(self) -> Status:
        """A value has ended: the whole one, or one inside."""
        self._at = _At.COMMA_OR_END
        return Status.MORE if self._closers else Status.DONE
