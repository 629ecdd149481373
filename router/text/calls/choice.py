"""One choice's text told apart: what of each delta is content, reasoning, or a call. Pure: no IO."""

import hashlib
from collections.abc import Iterable
from dataclasses import replace

from common.values.request import FinishReason
from router.text.calls.parser import Format, OutputParser
from router.text.calls.reader import Kind, Piece
from router.text.choice_text import CallPart, ChoiceDelta, ChoiceEnd


class FormattedChoice:
    """Owns the parser. `seed` makes the ids of calls, which are of this choice alone."""

    def __init__(self, form: Format, seed: str) -> None:
        self._parser = OutputParser(form)
        self._form = form
        self._seed = seed
        self._num_calls = 0
        self._num_complete = 0

    def apply(self, delta: ChoiceDelta) -> ChoiceDelta:
        """`delta` with its text told apart. Tokens stay where they are, so a marker's have no text."""
        pieces = self._parser.push(delta.text)
        end = delta.end
        if end is not None:
            pieces += self._parser.finish(is_cut=end.reason is not FinishReason.STOP)
        calls = tuple(part for piece in pieces if (part := self._part(piece)) is not None)
        return replace(
            delta,
            text=_joined(pieces, Kind.CONTENT),
            reasoning=_joined(pieces, Kind.REASONING),
            calls=calls,
            end=None if end is None else self._ended(end),
        )

    def _part(self, piece: Piece) -> CallPart | None:
        """A second call where only one is wanted is passed over."""
        if piece.kind is Kind.NAME:
            self._num_calls += 1
        index = self._num_calls - 1
        if self._form.is_single and index > 0:
            return None
        match piece.kind:
            case Kind.NAME:
                return CallPart(index, self._id_of(index), piece.text)
            case Kind.ARGUMENTS:
                return CallPart(index, arguments=piece.text)
            case Kind.CALL_END:
                self._num_complete += 1
        return None

    def _ended(self, end: ChoiceEnd) -> ChoiceEnd:
        return replace(end, has_calls=self._num_complete > 0)

    def _id_of(self, index: int) -> str:
        digest = hashlib.sha256(f"{self._seed}/{index}".encode()).hexdigest()
        return digest[:9] if self._form.tools == "mistral" else f"call_{digest[:24]}"  # its templates want nine


def joined_calls(parts: Iterable[CallPart]) -> tuple[CallPart, ...]:
    """Each call whole."""
    calls: dict[int, CallPart] = {}
    for part in parts:
        begun = calls.get(part.index)
        calls[part.index] = part if begun is None else replace(begun, arguments=begun.arguments + part.arguments)
    return tuple(calls.values())


def _joined(pieces: list[Piece], kind: Kind) -> str:
    return "".join(piece.text for piece in pieces if piece.kind is kind)
