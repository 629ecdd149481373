"""Which cells (group, layer, token) of a transfer have been announced. Pure: no IO."""

from bisect import bisect_left

from kvtransfer.chunk.plan import ChunkPlanner
from kvtransfer.events import Chunk


class Coverage:
    """Checks that the chunks of one link tile what the receiver lacks of each group exactly once."""

    def __init__(self, planner: ChunkPlanner, first_token: int, num_tokens: int) -> None:
        self._first_tokens = planner.first_tokens(first_token, num_tokens)
        self._num_tokens = num_tokens
        # Per group and layer: sorted, disjoint token ranges.
        self._ranges: list[list[list[tuple[int, int]]]] = [
            [[] for _ in group.layers if planner.shards(idx)] for idx, group in enumerate(planner.spec.groups)
        ]
        self._num_missing = sum(
            len(layers) * (num_tokens - first) for layers, first in zip(self._ranges, self._first_tokens, strict=True)
        )

    @property
    def is_complete(self) -> bool:
        return self._num_missing == 0

    def add(self, chunk: Chunk) -> str | None:
        """Take a chunk in that the planner has no problem with; a sentence when it lies outside or overlaps another."""
        first_token = self._first_tokens[chunk.group_idx]
        if chunk.token_start < first_token or chunk.token_end > self._num_tokens:
            got = f"[{chunk.token_start}, {chunk.token_end})"
            return f"chunk {chunk.seq}: tokens {got} outside [{first_token}, {self._num_tokens})"
        for layer_idx in range(chunk.layer_start, chunk.layer_end):
            if not _insert(self._ranges[chunk.group_idx][layer_idx], chunk.token_start, chunk.token_end):
                return f"chunk {chunk.seq}: overlaps an earlier one in layer {layer_idx}"
        self._num_missing -= (chunk.layer_end - chunk.layer_start) * (chunk.token_end - chunk.token_start)
        return None


def _insert(ranges: list[tuple[int, int]], start: int, end: int) -> bool:
    """Add [start, end) to sorted disjoint ranges; False when it overlaps one."""
    position = bisect_left(ranges, (start, end))
    if position > 0 and ranges[position - 1][1] > start:
        return False
    if position < len(ranges) and ranges[position][0] < end:
        return False
    ranges.insert(position, (start, end))
    return True
