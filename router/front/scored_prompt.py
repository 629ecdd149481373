"""A prompt with what both APIs say of its tokens: their logprobs, and where they stand in the text. No wire format."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from common.values.request import PromptLogprobs

# Tokens of a prompt in one message of a stream: clients bound what they receive (gRPC's at 4 MiB).
MAX_TOKENS_PER_MESSAGE = 256


class ScoredToken(NamedTuple):
    """`logprob` None: the first of a prompt. `rank` 1: none was more likely. `top`: (token id, logprob), best first."""

    token_id: int
    logprob: float | None
    rank: int = 0
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class ScoredPrompt:
    """`text` is what is repeated of it, "" = nothing; `offsets`, where logprobs of the text are wanted, its tokens'
    places there. `pieces` of logprobs come in order."""

    token_ids: Sequence[int]
    text: str = ""
    offsets: Sequence[int] = ()
    pieces: list[PromptLogprobs] = field(default_factory=list)

    def tokens(self) -> Iterator[ScoredToken]:
        """All of them, once all logprobs have come."""
        yield ScoredToken(self.token_ids[0], None)
        for piece in self.pieces:
            for position, logprob, rank in zip(range(piece.start, piece.end), piece.logprobs, piece.ranks, strict=True):
                yield ScoredToken(self.token_ids[position], logprob, rank, piece.top(position))

    def parts(self) -> Iterator[list[ScoredToken]]:
        """As many at a time as one message of a stream has room for."""
        tokens = self.tokens()
        while part := list(islice(tokens, MAX_TOKENS_PER_MESSAGE)):
            yield part
