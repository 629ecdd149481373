"""Where the end of a text stood before: an index over tokens, as LZ77 coders keep one. Pure: no IO.

The last place of each run of `MIN_MATCH` tokens, and from each place a link to the one before of the same run. A token
costs one entry, and a search looks at a few places: both are constant, whatever the length.
"""

from collections.abc import Sequence
from dataclasses import dataclass

# Shorter runs recur by chance in any text.
MIN_MATCH = 2
# Longer ones are not told apart.
MAX_MATCH = 32
# Places that a search compares: the newest ones.
MAX_PLACES = 4
# Tokens that one call takes into the index: a long prompt holds up no step.
MAX_NEW = 4096
# Stands between texts that do not follow one another; no token id.
SEPARATOR = -1


@dataclass(frozen=True, slots=True)
class Place:
    """Before `idx` stand the last `num_matching` tokens of what was searched for."""

    idx: int
    num_matching: int


class Lookup:
    """An index over `token_ids`, which its owner may append to."""

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids
        self._last: dict[tuple[int, ...], int] = {}
        self._links: list[int] = []  # of places from MIN_MATCH on; -1 = none before

    def update(self) -> None:
        """Take in what was appended: every place that a token stands behind."""
        token_ids, last, links = self.token_ids, self._last, self._links
        done = len(links) + MIN_MATCH
        for idx in range(done, min(len(token_ids), done + MAX_NEW)):
            run = token_ids[idx - 2], token_ids[idx - 1]
            links.append(last.get(run, -1))
            last[run] = idx

    def find(self, text: Sequence[int]) -> Place | None:
        """Where the longest end of `text` stands, the newest of equal ones. None: not even `MIN_MATCH` tokens do."""
        best: Place | None = None
        idx = self._last.get(tuple(text[-MIN_MATCH:]), -1)
        for _ in range(MAX_PLACES):
            if idx < 0:
                break
            num_matching = self._num_matching(text, idx)
            if best is None or num_matching > best.num_matching:
                best = Place(idx, num_matching)
            idx = self._links[idx - MIN_MATCH]
        return best

    def after(self, idx: int, num_tokens: int) -> list[int]:
        """What follows a place, up to a separator or the end."""
        found = self.token_ids[idx : idx + num_tokens]
        return found[: found.index(SEPARATOR)] if SEPARATOR in found else found

    def _num_matching(self, text: Sequence[int], idx: int) -> int:
        most = min(MAX_MATCH, idx, len(text))
        num_matching = MIN_MATCH
        while num_matching < most and self.token_ids[idx - num_matching - 1] == text[-num_matching - 1]:
            num_matching += 1
        return num_matching
