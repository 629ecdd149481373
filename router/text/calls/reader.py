"""The text of one choice as it comes, and what it is made into: content, reasoning, calls. Pure: no IO.

What reads a format is a generator that yields wherever it needs more text, so it is written as if all of the text
were there. It looks at characters, never at how they came, so the result does not depend on how the text was cut.

A call that is malformed becomes content: all of its text while nothing of it was given, else what is left of it.
"""

import json
import re
from collections.abc import Generator, Sequence
from enum import Enum, auto
from typing import NamedTuple, TypeVar

from router.text.calls.json_scan import JsonScan, Malformed, Status

ResultT = TypeVar("ResultT")
Reading = Generator[None, None, ResultT]
_SPACE = " \t\n\r"
_IN_STRING = re.compile(r'[^"\\\x00-\x1f]+')


class Kind(Enum):
    CONTENT = auto()
    REASONING = auto()
    NAME = auto()  # a call begins
    ARGUMENTS = auto()
    CALL_END = auto()  # its arguments are complete


class Piece(NamedTuple):
    kind: Kind
    text: str


class Ended(Exception):
    """The text has ended where more was wanted."""


class _Call:
    """The call that is being read."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.is_begun = False
        self.early_arguments = ""  # that came before the name
        self.has_arguments = False
        self.is_complete = False
        self.held: list[Piece] = []


class Reader:
    """Owns the text that is not read yet, or that may have to be given as content.

    With `is_whole` a call is given when it is complete: then nothing of a malformed one was given.
    """

    def __init__(self, *, is_whole: bool) -> None:
        self._is_whole = is_whole
        self._text = ""
        self._position = 0
        self._mark: int | None = None  # from here the text may become content
        self._is_ended = False
        self._is_cut = False
        self._call: _Call | None = None
        self._pieces: list[Piece] = []

    def add(self, text: str) -> None:
        kept = self._position if self._mark is None else self._mark
        self._text = self._text[kept:] + text
        self._position -= kept
        self._mark = None if self._mark is None else 0

    def end(self, *, is_cut: bool) -> None:
        """No more text comes; `is_cut`: its author would have gone on."""
        self._is_ended, self._is_cut = True, is_cut

    def taken(self) -> list[Piece]:
        """What was given since the last time, neighbours of one kind joined."""
        pieces: list[Piece] = []
        for kind, text in self._pieces:
            if pieces and pieces[-1].kind is kind and kind in (Kind.CONTENT, Kind.REASONING, Kind.ARGUMENTS):
                pieces[-1] = Piece(kind, pieces[-1].text + text)
            elif text or kind in (Kind.NAME, Kind.CALL_END):
                pieces.append(Piece(kind, text))
        self._pieces = []
        return pieces

    # ---- text ---------------------------------------------------------------------------------------

    def peek(self) -> Reading[str]:
        """The next character; "" at the end."""
        while self._position >= len(self._text):
            if self._is_ended:
                return ""
            yield
        return self._text[self._position]

    def skip(self, text: str) -> Reading[bool]:
        """Pass by `text` if that is what comes next."""
        while not (rest := self._text[self._position :]).startswith(text):
            if self._is_ended or not text.startswith(rest):
                return False
            yield
        self._position += len(text)
        return True

    def close(self, text: str) -> Reading[None]:
        """Pass by `text` if it comes next, or what there is of it at the end."""
        if not (yield from self.skip(text)) and self._is_ended and text.startswith(self._text[self._position :]):
            self._position = len(self._text)

    def expect(self, text: str) -> Reading[None]:
        if not (yield from self.skip(text)):
            raise self._unexpected(text)

    def skip_space(self) -> Reading[None]:
        while (char := (yield from self.peek())) and char in _SPACE:
            self._position += 1

    def until(self, markers: Sequence[str], kind: Kind) -> Reading[str]:
        """Give text up to the first of the markers and pass that by; returns it, "" when the text ended.

        White space before a marker belongs to the format. After a marker that is found, the text may become content
        again from there on, until `settle`.
        """
        while True:
            text = self._text[self._position :]
            found = min(((at, marker) for marker in markers if (at := text.find(marker)) >= 0), default=None)
            num_given = len(text) if found is None else found[0]
            if found is None and not self._is_ended:
                num_given -= _num_held(text, markers)
            if found is not None or not self._is_ended:
                num_given = len(text[:num_given].rstrip(_SPACE)) if markers else num_given
            self._give(kind, text[:num_given])
            if found is not None:
                self._mark = self._position + num_given
                self._position += found[0] + len(found[1])
                return found[1]
            self._position += num_given
            if self._is_ended:
                return ""
            yield

    def upto(self, markers: Sequence[str], max_length: int) -> Reading[tuple[str, str]]:
        """The text before the first of the markers, which is passed by, and the marker. Raises Malformed, Ended."""
        while True:
            text = self._text[self._position :]
            found = min(((at, marker) for marker in markers if (at := text.find(marker)) >= 0), default=None)
            if found is not None and found[0] <= max_length:
                self._position += found[0] + len(found[1])
                return text[: found[0]], found[1]
            if len(text) > max_length + max(map(len, markers)):
                raise Malformed
            if self._is_ended:
                self._position = len(self._text)
                raise Ended
            yield

    def json_value(self, *, is_arguments: bool = False) -> Reading[str]:
        """The text of the JSON value that comes next; as arguments it is given while it is read."""
        scan, parts, status = JsonScan(), [], Status.MORE
        while status is Status.MORE:
            if not (yield from self.peek()):
                raise Ended
            begin = self._position
            try:
                status = self._scan(scan)
            finally:
                parts.append(self._text[begin : self._position])
                if is_arguments and parts[-1]:
                    self.give_arguments(parts[-1])
        return "".join(parts)

    def _scan(self, scan: JsonScan) -> Status:
        """Read on in what is there."""
        text, status = self._text, Status.MORE
        while self._position < len(text) and status is Status.MORE:
            if scan.is_in_string and (plain := _IN_STRING.match(text, self._position)):
                self._position = plain.end()
                continue
            status = scan.feed(text[self._position])
            self._position += status is not Status.PAST
        return status

    def _unexpected(self, text: str) -> Malformed | Ended:
        """What to raise where something else came than was wanted: nothing at all, or something wrong."""
        rest = self._text[self._position :]
        return Ended() if self._is_ended and text.startswith(rest) else Malformed()

    # ---- what the text is made into -----------------------------------------------------------------

    def give_content(self, text: str) -> None:
        self._give(Kind.CONTENT, text)

    def mark(self) -> None:
        """From here on the text may become content, until `settle`."""
        self._mark = self._position

    def marked(self) -> str:
        """What was read since the mark."""
        assert self._mark is not None
        return self._text[self._mark : self._position]

    def settle(self) -> None:
        """What was read belongs to the format."""
        self._mark = None

    def give_back(self) -> None:
        """What was read since the mark is content after all."""
        self._give(Kind.CONTENT, self.marked())
        self._mark = None

    def call(self, reading: Reading[None]) -> Reading[bool]:
        """Read one call, whose text begins at the mark or here. False: it was malformed, or the text ended in it."""
        call = self._call = _Call()
        if self._mark is None:
            self.mark()
        try:
            yield from reading
            self._complete(call)
        except Malformed:
            pass
        except Ended:
            if call.is_complete or (self._is_cut and call.name is not None):
                self._begin(call)
                self._position = len(self._text)
                self._flush(call)
        self._call = None
        if not call.is_complete and self._mark is not None:
            self.give_back()
        self._mark = None
        return call.is_complete

    def give_name(self, name: object) -> None:
        """Raises Malformed for what is no name."""
        call = self._open_call()
        if not isinstance(name, str) or not name or call.name is not None:
            raise Malformed
        call.name = name
        if call.early_arguments:
            self.give_arguments("")
        if call.has_arguments:
            self._complete(call)

    def give_arguments(self, text: str) -> None:
        call = self._open_call()
        if call.name is None:
            call.early_arguments += text
            return
        self._begin(call)
        self._put(call, Piece(Kind.ARGUMENTS, text))
        self._pass_mark()

    def end_arguments(self) -> None:
        call = self._open_call()
        call.has_arguments = True
        if call.name is not None:
            self._complete(call)

    def _open_call(self) -> _Call:
        assert self._call is not None
        return self._call

    def _begin(self, call: _Call) -> None:
        if not call.is_begun:
            call.is_begun = True
            self._put(call, Piece(Kind.NAME, call.name or ""))
            self._put(call, Piece(Kind.ARGUMENTS, call.early_arguments))

    def _complete(self, call: _Call) -> None:
        """Raises Malformed when there is no name. A call without arguments has none."""
        if call.is_complete:
            return
        if call.name is None:
            raise Malformed
        self._begin(call)
        if not call.has_arguments:
            self._put(call, Piece(Kind.ARGUMENTS, "{}"))
        self._put(call, Piece(Kind.CALL_END, ""))
        call.is_complete = True
        self._flush(call)

    def _flush(self, call: _Call) -> None:
        self._pieces += call.held
        call.held = []
        self._mark = self._position

    def _put(self, call: _Call, piece: Piece) -> None:
        (call.held if self._is_whole else self._pieces).append(piece)

    def _pass_mark(self) -> None:
        """What was given is not given again."""
        if not self._is_whole:
            self._mark = self._position

    def _give(self, kind: Kind, text: str) -> None:
        if text:
            self._pieces.append(Piece(kind, text))


def loads(text: str) -> object:
    """Raises Malformed. Half a surrogate pair is no text."""
    try:
        value = json.loads(text)
        if isinstance(value, str):
            value.encode()
    except (ValueError, RecursionError) as error:
        raise Malformed from error
    return value


def _num_held(text: str, markers: Sequence[str]) -> int:
    """Characters at the end that may be the beginning of a marker."""
    longest = max(map(len, markers), default=0)
    for begin in range(max(0, len(text) - longest + 1), len(text)):
        if any(marker.startswith(text[begin:]) for marker in markers):
            return len(text) - begin
    return 0
