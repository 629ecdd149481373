"""Finds stop strings in a text that arrives in pieces, and holds back only what may still become one. Pure: no IO.

One Knuth-Morris-Pratt automaton per stop string: its state is the length of the longest prefix of the stop string
that the text so far ends with. What must be held back is therefore the largest state, never more, and the
result does not depend on how the text was cut into pieces.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scan:
    """`text` may be shown now. When `matched` is set, `text` is the last of it and the rest is dropped."""

    text: str
    matched: str | None = None


class StopScanner:
    """Of one choice. Which stop string wins: the one that is complete first; of several, the longest."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool) -> None:
        self._stops = tuple(stops)
        self._failures = [_failure_table(stop) for stop in self._stops]
        self._include_stop = include_stop
        self._states = [0] * len(self._stops)
        self._held = ""
        self._is_shown: list[bool] = []  # by character held; empty while all of them are

    @property
    def num_held(self) -> int:
        """Characters held back."""
        return len(self._held)

    def push(self, piece: str, *, may_stop: bool = True, is_shown: bool = True) -> Scan:
        """Take the next piece. With `may_stop` false (min_tokens) a complete stop string is passed over.

        A piece that is not shown (a special token) counts for stop strings and is no part of what is returned.
        """
        if not self._stops:
            return Scan(piece if is_shown else "")
        if not is_shown or self._is_shown:
            self._is_shown = [*(self._is_shown or [True] * len(self._held)), *[is_shown] * len(piece)]
        text = self._held + piece
        for idx in range(len(self._held), len(text)):
            stop = self._advance(text[idx])
            if stop is not None and may_stop:
                return self._matched(text[: idx + 1], stop)
        num_held = max(self._states)
        num_free = len(text) - num_held
        shown, self._held = self._visible(text[:num_free]), text[num_free:]
        self._is_shown = [] if all(self._is_shown[num_free:]) else self._is_shown[num_free:]
        return Scan(shown)

    def flush(self) -> str:
        """What was held, once no more text comes."""
        held, self._held = self._visible(self._held), ""
        return held

    def _advance(self, char: str) -> str | None:
        """Feed one character to every automaton; returns the longest stop string that it completes."""
        complete: str | None = None
        for idx, stop in enumerate(self._stops):
            state = _next_state(stop, self._failures[idx], self._states[idx], char)
            if state == len(stop):
                if complete is None or len(stop) > len(complete):
                    complete = stop
                state = self._failures[idx][state]
            self._states[idx] = state
        return complete

    def _matched(self, text: str, stop: str) -> Scan:
        self._held = ""
        before = self._visible(text[: len(text) - len(stop)])
        return Scan(before + stop if self._include_stop else before, stop)

    def _visible(self, text: str) -> str:
        """Of the beginning of what is held and taken, what may be shown."""
        if not self._is_shown:
            return text
        return "".join(char for char, is_shown in zip(text, self._is_shown, strict=False) if is_shown)


def _next_state(stop: str, failure: list[int], state: int, char: str) -> int:
    while state and stop[state] != char:
        state = failure[state]
    return state + 1 if stop[state] == char else 0


def _failure_table(stop: str) -> list[int]:
    """`table[n]`: length of the longest proper prefix of `stop[:n]` that is also its suffix."""
    table = [0] * (len(stop) + 1)
    length = 0
    for idx in range(1, len(stop)):
        while length and stop[idx] != stop[length]:
            length = table[length]
        length += stop[idx] == stop[length]
        table[idx + 1] = length
    return table
