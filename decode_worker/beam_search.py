"""Beam search over candidates that others compute: which beams go on, which are complete, when it ends. Pure: no IO.

Equal to that of transformers (`GenerationMixin._beam_search`). Each step the candidates of all beams compete by their
sum of logprobs, so many that a full set of beams goes on however many of them end. Of the best `num_beams`, those that
end are complete: they compete by sum / length ** length_penalty. The search ends at max_tokens, or when no beam can
better the complete ones, as `early_stopping` has it:

    true     as soon as `num_beams` are complete
    false    when the best beam, were it complete at its present length, would be no better than the worst of them
    never    the same, at the length that suits it best
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from common.values.request import EarlyStopping, FinishReason, SampledToken, SamplingParams

# Of one beam: (token id, logprob) of the most likely tokens, best first.
Candidates = Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True, eq=False)
class Beam:
    """Tokens as a chain from the last to the first, shared by beams with the same beginning. `row`: of what its last
    token was chosen from, as many as the client is told; a long search keeps them all."""

    score: float
    num_tokens: int = 0
    token: tuple[int, float] = (0, 0.0)
    row: Candidates = ()
    parent: "Beam | None" = None

    def tokens(self, num_logprobs: int | None) -> tuple[SampledToken, ...]:
        """First to last, with as many logprobs as are wanted."""
        tokens: list[SampledToken] = []
        beam: Beam | None = self
        while beam is not None and beam.num_tokens:
            token_id, logprob = beam.token
            tokens.append(SampledToken(token_id, None if num_logprobs is None else logprob, tuple(beam.row)))
            beam = beam.parent
        return tuple(reversed(tokens))


@dataclass(frozen=True, slots=True)
class Step:
    """One beam of the next step: the beam of the last one that it goes on from, and its token."""

    parent_idx: int
    token_id: int


@dataclass(frozen=True, slots=True)
class _Complete:
    score: float
    beam: Beam
    reason: FinishReason


class BeamSearch:
    """Begins with the prompt as its only beam."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._running = [Beam(0.0)]
        self._complete: list[_Complete] = []  # best first

    def advance(self, candidates: Sequence[Candidates]) -> tuple[Step, ...]:
        """The beams of the next step, best first, from the candidates of each beam; none: the search has ended."""
        params = self._params
        found = heapq.nlargest(params.num_candidates, self._continued(candidates), key=lambda pair: pair[1].score)
        ends = [params.finish_reason(beam.token[0], beam.num_tokens) for _, beam in found]
        going_on = [pair for pair, end in zip(found, ends, strict=True) if end is None][: params.num_beams]
        self._add_complete([(beam, end) for (_, beam), end in zip(found, ends, strict=True)][: params.num_beams])
        self._running = [beam for _, beam in going_on]
        if not self._running or not self._can_improve():
            self._running = []
            return ()
        return tuple(Step(parent_idx, beam.token[0]) for parent_idx, beam in going_on)

    def best(self, num: int) -> list[tuple[tuple[SampledToken, ...], FinishReason]]:
        """Of an ended search, the best with why each ended."""
        num_logprobs = self._params.num_logprobs
        return [(each.beam.tokens(num_logprobs), each.reason) for each in self._complete[:num]]

    def _continued(self, candidates: Sequence[Candidates]) -> list[tuple[int, Beam]]:
        """(index of the beam, the beam with one more token) of every candidate."""
        num_told = self._params.num_logprobs or 0  # of candidates, whose number the client's stop tokens multiply
        return [
            (idx, Beam(beam.score + pair[1], beam.num_tokens + 1, pair, told, beam))
            for idx, (beam, row) in enumerate(zip(self._running, candidates, strict=True))
            for told in [row[:num_told]]
            for pair in row[: self._params.num_candidates]
        ]

    def _add_complete(self, found: Sequence[tuple[Beam, FinishReason | None]]) -> None:
        added = [
            _Complete(self._final(beam.score, beam.num_tokens), beam, end) for beam, end in found if end is not None
        ]
        ranked = sorted([*self._complete, *added], key=lambda each: each.score, reverse=True)
        self._complete = ranked[: self._params.num_beams]

    def _can_improve(self) -> bool:
        params, best = self._params, self._running[0]
        if len(self._complete) < params.num_beams:
            return True
        if params.early_stopping is EarlyStopping.TRUE:
            return False
        is_hopeful = params.early_stopping is EarlyStopping.NEVER and params.length_penalty > 0.0
        length = params.max_tokens if is_hopeful else best.num_tokens
        return self._final(best.score, length) > self._complete[-1].score

    def _final(self, score: float, num_tokens: int) -> float:
        return float(score / num_tokens**self._params.length_penalty)
