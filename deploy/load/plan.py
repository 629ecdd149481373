"""What is sent when: arrivals, lengths and shared prefixes. Pure: no IO; randomness is passed in.

A prompt is a list of pieces, each a name and a length; equal names become equal tokens, so that a plan says what is
shared without knowing any vocabulary.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deploy.load.traces import TraceRow

# A hash id of a Mooncake trace stands for so many tokens.
TRACE_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Piece:
    """`num_tokens` tokens that are the first of an endless row that `name` stands for."""

    name: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """To be sent `at_s` after the start."""

    at_s: float
    pieces: tuple[Piece, ...]
    max_tokens: int

    @property
    def num_input_tokens(self) -> int:
        return sum(piece.num_tokens for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Shape:
    """Requests of one kind. The first `prefix_len` tokens are one of `num_prefixes` prefixes."""

    input_len: int
    output_len: int
    prefix_len: int = 0
    num_prefixes: int = 1


def arrivals(rate_per_s: float, rng: random.Random) -> Iterator[float]:
    """A Poisson process from 0; an infinite rate sends everything at once."""
    now_s = 0.0
    while True:
        yield now_s
        now_s += rng.expovariate(rate_per_s) if rate_per_s != float("inf") else 0.0


def synthetic(shape: Shape, num_requests: int, rate_per_s: float, rng: random.Random) -> list[PlannedRequest]:
    """Requests of one shape; what is not prefix is different in each."""
    at_s = arrivals(rate_per_s, rng)
    return [PlannedRequest(next(at_s), _pieces(shape, idx, rng), shape.output_len) for idx in range(num_requests)]


def replayed(rows: Sequence[TraceRow], time_scale: float = 1.0, length_scale: float = 1.0) -> list[PlannedRequest]:
    """A trace, `time_scale` times as fast and with lengths times `length_scale`; sharing stays what it was."""
    first_s = rows[0].at_s if rows else 0.0
    return [
        PlannedRequest(
            (row.at_s - first_s) / time_scale,
            tuple(_trace_pieces(row, idx, length_scale)),
            _scaled(row.num_output_tokens, length_scale),
        )
        for idx, row in enumerate(rows)
    ]


def bounded(plan: Sequence[PlannedRequest], max_requests: int | None, max_time_s: float | None) -> list[PlannedRequest]:
    """The first part of a plan."""
    within = [request for request in plan if max_time_s is None or request.at_s < max_time_s]
    return within[:max_requests]


def _pieces(shape: Shape, idx: int, rng: random.Random) -> tuple[Piece, ...]:
    own = Piece(f"request-{idx}", shape.input_len - shape.prefix_len)
    if not shape.prefix_len:
        return (own,)
    prefix = Piece(f"prefix-{rng.randrange(shape.num_prefixes)}", shape.prefix_len)
    return (prefix, own) if own.num_tokens else (prefix,)


def _trace_pieces(row: TraceRow, idx: int, length_scale: float) -> Iterator[Piece]:
    """One piece per hash id. A trace without them shares nothing."""
    left = _scaled(row.num_input_tokens, length_scale)
    block = _scaled(TRACE_BLOCK_TOKENS, length_scale)
    for hash_id in row.hash_ids:
        if left <= 0:
            return
        yield Piece(f"block-{hash_id}", min(left, block))
        left -= block
    if left > 0:
        yield Piece(f"request-{idx}", left)


def _scaled(length: int, scale: float) -> int:
    return max(1, round(length * scale))
