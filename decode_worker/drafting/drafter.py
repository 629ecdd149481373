"""What proposes drafts for one sequence: `Drafter`, and the one that looks them up. Pure: no IO."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from decode_worker.drafting.answers import RecentAnswers
from decode_worker.drafting.lookup import MAX_MATCH, Lookup, Place


@dataclass(frozen=True, slots=True)
class Draft:
    """Guesses at the next tokens. `num_matching`: how many tokens before the first one agree with its source."""

    token_ids: Sequence[int] = ()
    num_matching: int = 0


NOTHING = Draft()


class Drafter(Protocol):
    """Watches the tokens of one sequence. A small model would be another kind."""

    def propose(self, max_tokens: int) -> Draft:
        """For the tokens as they are now; the same when asked again."""
        ...


class LookupDrafter:
    """What stood behind the same words before: in the request's own prompt and output, or in recent answers.

    While a text goes on as one before it did, nothing is searched.
    """

    def __init__(self, token_ids: list[int], answers: RecentAnswers) -> None:
        """`token_ids`: prompt and output, which grow."""
        self._own = Lookup(token_ids)
        self._answers = answers
        self._source = self._own
        self._place: Place | None = None
        self._num_seen = len(token_ids)

    def propose(self, max_tokens: int) -> Draft:
        token_ids = self._own.token_ids
        self._own.update()
        self._follow()
        if self._place is None:
            self._search()
        self._num_seen = len(token_ids)
        if self._place is None:
            return NOTHING
        idx = self._place.idx
        if self._source is self._own:
            return Draft(_repeated(token_ids, idx, max_tokens), self._place.num_matching)
        return Draft(self._source.after(idx, max_tokens), self._place.num_matching)

    def _follow(self) -> None:
        """Go on from the place as far as the newest tokens are those that stand there."""
        token_ids, there = self._own.token_ids, self._source.token_ids
        for token_id in token_ids[self._num_seen :]:
            if self._place is None:
                return
            idx, num_matching = self._place.idx, self._place.num_matching
            is_same = idx < len(there) and there[idx] == token_id
            self._place = Place(idx + 1, min(num_matching + 1, MAX_MATCH)) if is_same else None

    def _search(self) -> None:
        """The longest match; of equal ones the request's own, then the newest."""
        for source in (self._own, *reversed(self._answers.halves)):
            found = source.find(self._own.token_ids)
            if found is not None and (self._place is None or found.num_matching > self._place.num_matching):
                self._source, self._place = source, found


def _repeated(token_ids: list[int], idx: int, num_tokens: int) -> list[int]:
    """What follows a place; behind the end it is what follows again: the text repeats itself."""
    found = token_ids[idx : idx + num_tokens]
    period = len(token_ids) - idx
    while 0 < len(found) < num_tokens:
        found.append(found[len(found) - period])
    return found
