"""Turns planned pieces into token ids that the server knows, or into words. Owns the vocabulary."""

import random
from collections.abc import Sequence
from functools import lru_cache

from deploy.load.plan import Piece

# Common short words, one token each in most vocabularies; with a space before.
WORDS = (
    *("the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not", "he"),
    *("this", "are", "or", "his", "from", "at", "which", "but", "have", "an", "had", "they", "you", "were", "their"),
    *("one", "all", "we", "can", "her", "has", "there", "been", "if", "more", "when", "will", "would", "who", "so"),
    *("no", "out", "up", "said", "what", "its", "about", "than", "into", "them", "could", "time", "some", "these"),
)
_MAX_ROWS = 4096


class Prompts:
    """Equal pieces give equal tokens, in any order; the seed decides all of them."""

    def __init__(self, vocabulary: Sequence[int], seed: int) -> None:
        assert vocabulary, "a vocabulary has tokens"
        self._vocabulary = vocabulary
        self._seed = seed
        self._row = lru_cache(_MAX_ROWS)(self._make_row)

    def token_ids(self, pieces: Sequence[Piece]) -> list[int]:
        """The prompt as token ids."""
        return [token_id for piece in pieces for token_id in self._row(piece.name, piece.num_tokens)]

    def text(self, pieces: Sequence[Piece]) -> str:
        """The prompt as words, about one per token: for servers that take no token ids."""
        words = [WORDS[token_id % len(WORDS)] for token_id in self.token_ids(pieces)]
        return " ".join(words)

    def _make_row(self, name: str, num_tokens: int) -> tuple[int, ...]:
        rng = random.Random(f"{self._seed}/{name}")
        return tuple(rng.choices(self._vocabulary, k=num_tokens))
