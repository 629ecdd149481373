"""Which cells (layer, token) of a transfer have been announced. Pure: no IO."""

from bisect import bisect_left

from kvtransfer.events import Chunk


class Coverage:
    """Checks that chunks tile layers [0, num_layers) x tokens [first_token, num_tokens) exactly once."""

    def __init__(self, num_layers: int, first_token: int, num_tokens: int) -> None:
        self._first_token = first_token
        self._num_tokens = num_tokens
        self._num_missing = num_layers * (num_tokens - first_token)
        # Per layer: sorted, disjoint token ranges.
        self._ranges: list[list[tuple[int, int]]] = [[] for _ in range(num_layers)]

    @property
    def is_complete(self) -> bool:
        return self._num_missing == 0

    def add(self, chunk: Chunk) -> str | None:
        """Take a chunk in; a sentence when it lies outside or overlaps an earlier one."""
        if chunk.token_start < self._first_token or chunk.token_end > self._num_tokens:
            got = f"[{chunk.token_start}, {chunk.token_end})"
            return f"chunk {chunk.seq}: tokens {got} outside [{self._first_token}, {self._num_tokens})"
        for layer_idx in range(chunk.layer_start, chunk.layer_end):
            if not _insert(self._ranges[layer_idx], chunk.token_start, chunk.token_end):
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
