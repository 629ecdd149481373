"""How likely a draft is right, learnt from what came of earlier ones. Pure: no IO.

What stood before the draft tells most: after two words in common a text goes on as it did before now and then, after
twenty nearly always. So the share is kept by the length of the match. It is learnt from every proposal, also from those
that were not computed: what the sequence went on with shows whether they were right.
"""

from collections.abc import Iterable, Sequence

# Matches of at least so many tokens are a class of their own.
_CLASSES = (0, 3, 5, 8, 16)
# Before anything is known, by class.
_FIRST_GUESS = (0.3, 0.4, 0.6, 0.8, 0.9)
# Weight of the newest outcome: of one sequence, and of all of a worker, which a new sequence starts from.
_NEWEST = 0.1
_NEWEST_OF_ALL = 0.01


class Acceptance:
    """Moving averages per class of match. `others`: what to start from; learns too."""

    def __init__(self, others: "Acceptance | None" = None) -> None:
        self._others = others
        self._newest = _NEWEST if others is not None else _NEWEST_OF_ALL
        self._shares: list[float] = list(others._shares) if others is not None else list(_FIRST_GUESS)

    def learn(self, draft: Sequence[int], num_matching: int, token_ids: Sequence[int]) -> None:
        """`token_ids` came where `draft` was proposed: each token as far as they agree, and the first that does not."""
        for drafted, token_id in zip(draft, token_ids, strict=False):
            self._add(num_matching, is_right=drafted == token_id)
            if drafted != token_id:
                return
            num_matching += 1

    def chances(self, num_matching: int, num_drafts: int) -> Iterable[float]:
        """That a draft is accepted: the first, the first two, and so on."""
        chance = 1.0
        for idx in range(num_drafts):
            chance *= self._shares[_class_of(num_matching + idx)]
            yield chance

    def _add(self, num_matching: int, *, is_right: bool) -> None:
        at = _class_of(num_matching)
        self._shares[at] += self._newest * (is_right - self._shares[at])
        if self._others is not None:
            self._others._add(num_matching, is_right=is_right)


def _class_of(num_matching: int) -> int:
    return sum(num_matching >= least for least in _CLASSES) - 1
