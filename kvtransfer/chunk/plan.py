"""How a request's KV is cut into chunks. Pure: no IO.

A chunk is a rectangle of layers x tokens. Layers are coalesced until a chunk reaches `min_chunk_bytes` (gloo
reaches about 2 GB/s with messages of 1 MiB, a sixth of that with 64 KiB); a token range so long that one layer
exceeds the maximum is split by tokens. Both sides derive the length on the link from the rectangle and check it:
gloo aborts the process when a message is longer than what was posted, and accepts a shorter one silently.
"""

from dataclasses import dataclass

from kvtransfer.events import Chunk

FRAME_BYTES = 64  # around a chunk's data: header before it, tag behind it
MAX_OVER_MIN = 4


@dataclass(frozen=True, slots=True)
class ChunkPlanner:
    """The sizes that both sides share. `bytes_per_token_layer` is K and V of one token in one layer."""

    num_layers: int
    bytes_per_token_layer: int
    min_chunk_bytes: int
    frame_bytes: int = FRAME_BYTES

    def num_bytes(self, num_layers: int, num_tokens: int) -> int:
        """Length on the link of a rectangle, header and tag included."""
        return self.frame_bytes + num_layers * num_tokens * self.bytes_per_token_layer

    def problem(self, chunk: Chunk) -> str | None:
        """What is wrong with an announced chunk whatever request it is of, or None."""
        if not 0 <= chunk.layer_start < chunk.layer_end <= self.num_layers:
            return f"chunk {chunk.seq}: layers [{chunk.layer_start}, {chunk.layer_end}) of {self.num_layers}"
        if not 0 <= chunk.token_start < chunk.token_end:
            return f"chunk {chunk.seq}: tokens [{chunk.token_start}, {chunk.token_end})"
        expected = self.num_bytes(chunk.layer_end - chunk.layer_start, chunk.token_end - chunk.token_start)
        if chunk.num_bytes != expected:
            return f"chunk {chunk.seq}: expected {expected} bytes, announced {chunk.num_bytes}"
        return None

    def layers_per_chunk(self, num_tokens: int) -> int:
        """Fewest layers of `num_tokens` tokens that reach the minimum; 1 when one layer alone does."""
        layer_bytes = num_tokens * self.bytes_per_token_layer
        return min(self.num_layers, max(1, -(-self.min_chunk_bytes // layer_bytes)))

    def tokens_per_chunk(self, num_tokens: int) -> int:
        """`num_tokens`, or less when one layer of them would exceed the maximum: pieces of nearly equal size."""
        max_tokens = max(1, MAX_OVER_MIN * self.min_chunk_bytes // self.bytes_per_token_layer)
        num_pieces = -(-num_tokens // max_tokens)
        return -(-num_tokens // num_pieces)


class ChunkCutter:
    """Cuts one transfer's KV, as it becomes computed, into chunks: every cell exactly once, `seq` from 0."""

    def __init__(self, planner: ChunkPlanner, first_token: int, num_tokens: int) -> None:
        if not 0 <= first_token < num_tokens:
            raise ValueError(f"empty transfer: tokens [{first_token}, {num_tokens})")
        self._planner = planner
        self._num_tokens = num_tokens
        self._token_start = first_token  # below it every layer is cut
        self._token_end = first_token  # the range [token_start, token_end) is computed in `_layers_done` layers,
        self._layers_done = planner.num_layers  # and cut in `_layers_cut`
        self._layers_cut = planner.num_layers
        self._num_chunks = 0

    @property
    def num_chunks(self) -> int:
        """Chunks cut so far."""
        return self._num_chunks

    @property
    def is_complete(self) -> bool:
        return self._token_end == self._num_tokens and self._layers_cut == self._planner.num_layers

    def advance(self, num_layers: int, token_end: int) -> list[Chunk]:
        """Chunks that became ready now that layers [0, num_layers) are written for every token below `token_end`.

        Raises ValueError when the computation goes backwards or past the end.
        """
        self._check(num_layers, token_end)
        if token_end < self._token_end or token_end == self._token_start:
            return []  # below the first token to ship
        chunks = []
        if token_end > self._token_end:
            chunks = self._cut(self._planner.num_layers)
            self._token_start, self._token_end, self._layers_cut = self._token_end, token_end, 0
        return chunks + self._cut(num_layers)

    def finish(self) -> list[Chunk]:
        """Everything is computed: the remaining chunks."""
        return self.advance(self._planner.num_layers, self._num_tokens)

    def _check(self, num_layers: int, token_end: int) -> None:
        if not 0 <= num_layers <= self._planner.num_layers:
            raise ValueError(f"layer {num_layers} of {self._planner.num_layers}")
        if token_end > self._num_tokens:
            raise ValueError(f"token {token_end} of {self._num_tokens}")
        has_begun = self._token_end > self._token_start
        if has_begun and (token_end, num_layers) < (self._token_end, self._layers_done):
            raise ValueError(f"computed backwards to layer {num_layers}, token {token_end}")

    def _cut(self, layers_done: int) -> list[Chunk]:
        self._layers_done = layers_done
        if self._token_end == self._token_start:
            return []
        per_chunk = self._planner.layers_per_chunk(self._token_end - self._token_start)
        chunks: list[Chunk] = []
        while (num_layers := min(per_chunk, layers_done - self._layers_cut)) > 0:
            if num_layers < per_chunk and layers_done < self._planner.num_layers:
                break
            chunks += self._rectangles(self._layers_cut, self._layers_cut + num_layers)
            self._layers_cut += num_layers
        return chunks

    def _rectangles(self, layer_start: int, layer_end: int) -> list[Chunk]:
        step = self._planner.tokens_per_chunk(self._token_end - self._token_start)
        chunks = []
        for token_start in range(self._token_start, self._token_end, step):
            token_end = min(token_start + step, self._token_end)
            num_bytes = self._planner.num_bytes(layer_end - layer_start, token_end - token_start)
            chunks.append(Chunk(self._num_chunks, layer_start, layer_end, token_start, token_end, num_bytes))
            self._num_chunks += 1
        return chunks
