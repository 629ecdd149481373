"""Of several choices the best, by the mean logprob of their tokens: what `best_of` returns. Pure: no IO.

What a choice gives is kept until all have ended; then the best are told under the numbers 0, 1, ..., best first.
"""

from collections.abc import Iterable
from dataclasses import replace

from router.text.choice_text import ChoiceDelta


class BestChoices:
    """Of `num_choices`, the `num_best` best."""

    def __init__(self, num_choices: int, num_best: int) -> None:
        self._deltas: list[list[ChoiceDelta]] = [[] for _ in range(num_choices)]
        self._num_best = num_best

    def add(self, deltas: Iterable[ChoiceDelta]) -> None:
        for delta in deltas:
            self._deltas[delta.choice_idx].append(delta)

    def deltas(self) -> tuple[ChoiceDelta, ...]:
        """All of the best choices, renumbered. Of equal ones the first generated goes first."""
        best = sorted(self._deltas, key=mean_logprob, reverse=True)[: self._num_best]
        return tuple(replace(delta, choice_idx=place) for place, own in enumerate(best) for delta in own)


def mean_logprob(deltas: Iterable[ChoiceDelta]) -> float:
    """Of a choice's tokens, the one that ended it included; below every other for a choice without tokens."""
    logprobs = [token.logprob for delta in deltas for token in delta.tokens if token.logprob is not None]
    return sum(logprobs) / len(logprobs) if logprobs else float("-inf")
