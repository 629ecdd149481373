"""How a request's KV is cut into chunks. Pure: no IO.

A chunk is a box of layers x tokens x shards of one group. Layers are coalesced until a chunk reaches
`min_chunk_bytes` (gloo reaches about 2 GB/s with messages of 1 MiB, a sixth of that with 64 KiB); a token range so
long that one layer exceeds the maximum is split by tokens. Of a group with a window only the tokens that later ones
read are shipped. Both sides derive the length on the link from the box and check it: gloo aborts the process when a
message is longer than what was posted, and accepts a shorter one silently.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from common.engine.contract.kv_spec import KVGroup, KVSpec
from common.values.ranks import WHOLE, Rank, ranks_of
from kvtransfer.events import Chunk

FRAME_BYTES = 64  # around a chunk's data: header before it, tag behind it
MAX_OVER_MIN = 4


def linked_shards(group: KVGroup, sender: Rank, receiver: Rank) -> range:
    """What a sender's rank ships to a receiver's rank: over all senders, what the receiver holds, each shard once.

    Empty when the two have nothing to say to each other. Ranks that hold the same take turns.
    """
    wanted = [shard for shard in group.held(receiver) if _shipping(group, shard, sender, receiver) == sender]
    return range(wanted[0], wanted[-1] + 1) if wanted else range(0)


def _shipping(group: KVGroup, shard: int, sender: Rank, receiver: Rank) -> Rank:
    """Which of the sender's ranks ships a shard to the receiver's rank."""
    holders = [rank for rank in ranks_of(sender.world_size) if shard in group.held(rank)]
    return holders[receiver.rank % len(holders)]


@dataclass(frozen=True, slots=True)
class ChunkPlanner:
    """The sizes that both ends of one link share."""

    spec: KVSpec
    min_chunk_bytes: int
    sender: Rank = WHOLE
    receiver: Rank = WHOLE
    frame_bytes: int = FRAME_BYTES

    def shards(self, group_idx: int) -> range:
        """What the link carries of a group."""
        return linked_shards(self.spec.groups[group_idx], self.sender, self.receiver)

    def bytes_per_token_layer(self, group_idx: int) -> int:
        """Of what the link carries."""
        group = self.spec.groups[group_idx]
        return group.bytes_per_token_layer // group.num_shards * len(self.shards(group_idx))

    def num_bytes(self, group_idx: int, num_layers: int, num_tokens: int) -> int:
        """Length on the link of a chunk, header and tag included."""
        return self.frame_bytes + num_layers * num_tokens * self.bytes_per_token_layer(group_idx)

    def problem(self, chunk: Chunk) -> str | None:
        """What is wrong with an announced chunk whatever request it is of, or None."""
        if not 0 <= chunk.group_idx < len(self.spec.groups):
            return f"chunk {chunk.seq}: group {chunk.group_idx} of {len(self.spec.groups)}"
        num_layers = len(self.spec.groups[chunk.group_idx].layers)
        if not 0 <= chunk.layer_start < chunk.layer_end <= num_layers:
            return f"chunk {chunk.seq}: layers [{chunk.layer_start}, {chunk.layer_end}) of {num_layers}"
        if not 0 <= chunk.token_start < chunk.token_end:
            return f"chunk {chunk.seq}: tokens [{chunk.token_start}, {chunk.token_end})"
        shards = self.shards(chunk.group_idx)
        if not shards or (chunk.shard_start, chunk.shard_end) != (shards.start, shards.stop):
            got = f"[{chunk.shard_start}, {chunk.shard_end})"
            return f"chunk {chunk.seq}: expected shards [{shards.start}, {shards.stop}), announced {got}"
        num_tokens = chunk.token_end - chunk.token_start
        expected = self.num_bytes(chunk.group_idx, chunk.layer_end - chunk.layer_start, num_tokens)
        if chunk.num_bytes != expected:
            return f"chunk {chunk.seq}: expected {expected} bytes, announced {chunk.num_bytes}"
        return None

    def layers_per_chunk(self, group_idx: int, num_tokens: int) -> int:
        """Fewest layers of `num_tokens` tokens that reach the minimum; 1 when one layer alone does."""
        layer_bytes = num_tokens * self.bytes_per_token_layer(group_idx)
        return min(len(self.spec.groups[group_idx].layers), max(1, -(-self.min_chunk_bytes // layer_bytes)))

    def tokens_per_chunk(self, group_idx: int, num_tokens: int) -> int:
        """`num_tokens`, or less when one layer of them would exceed the maximum: pieces of nearly equal size."""
        max_tokens = max(1, MAX_OVER_MIN * self.min_chunk_bytes // self.bytes_per_token_layer(group_idx))
        num_pieces = -(-num_tokens // max_tokens)
        return -(-num_tokens // num_pieces)

    def first_tokens(self, first_token: int, num_tokens: int) -> tuple[int, ...]:
        """Of each group the first token to ship, when the receiver lacks tokens [first_token, num_tokens)."""
        return tuple(max(first_token, group.first_token_needed(num_tokens)) for group in self.spec.groups)


class ChunkCutter:
    """Cuts one transfer's KV, as it becomes computed, into chunks: every cell exactly once, `seq` from 0."""

    def __init__(self, planner: ChunkPlanner, first_token: int, num_tokens: int) -> None:
        if not 0 <= first_token < num_tokens:
            raise ValueError(f"empty transfer: tokens [{first_token}, {num_tokens})")
        first_tokens = planner.first_tokens(first_token, num_tokens)
        self._num_layers = planner.spec.num_layers
        self._num_tokens = num_tokens
        self._groups = [
            _GroupCutter(planner, idx, first) for idx, first in enumerate(first_tokens) if planner.shards(idx)
        ]
        self._computed = (0, 0)  # token_end, num_layers
        self._num_chunks = 0

    @property
    def num_chunks(self) -> int:
        """Chunks cut so far."""
        return self._num_chunks

    def advance(self, num_layers: int, token_end: int) -> list[Chunk]:
        """Chunks that became ready now that layers [0, num_layers) are written for every token below `token_end`.

        Raises ValueError when the computation goes backwards or past the end.
        """
        self._check(num_layers, token_end)
        self._computed = (token_end, num_layers)
        chunks = []
        for group in self._groups:
            for box in group.advance(num_layers, token_end):
                chunks.append(Chunk(self._num_chunks, *box))
                self._num_chunks += 1
        return chunks

    def finish(self) -> list[Chunk]:
        """Everything is computed: the remaining chunks."""
        return self.advance(self._num_layers, self._num_tokens)

    def _check(self, num_layers: int, token_end: int) -> None:
        if not 0 <= num_layers <= self._num_layers:
            raise ValueError(f"layer {num_layers} of {self._num_layers}")
        if token_end > self._num_tokens:
            raise ValueError(f"token {token_end} of {self._num_tokens}")
        if (token_end, num_layers) < self._computed:
            raise ValueError(f"computed backwards to layer {num_layers}, token {token_end}")


# Layers and tokens of a chunk, its length, its group and shards: `Chunk` without its number.
_Box = tuple[int, int, int, int, int, int, int, int]


class _GroupCutter:
    """Cuts the KV of one group."""

    def __init__(self, planner: ChunkPlanner, group_idx: int, first_token: int) -> None:
        self._planner = planner
        self._group_idx = group_idx
        self._layers = planner.spec.groups[group_idx].layers
        self._token_start = first_token  # below it every layer is cut
        self._token_end = first_token  # the range [token_start, token_end) is cut in `_layers_cut` layers
        self._layers_cut = len(self._layers)

    def advance(self, num_layers: int, token_end: int) -> Iterator[_Box]:
        """What became ready; arguments as of `ChunkCutter.advance`."""
        if token_end < self._token_end or token_end == self._token_start:
            return  # below the first token to ship
        if token_end > self._token_end:
            yield from self._cut(len(self._layers))
            self._token_start, self._token_end, self._layers_cut = self._token_end, token_end, 0
        yield from self._cut(bisect_left(self._layers, num_layers))

    def _cut(self, layers_done: int) -> Iterator[_Box]:
        if self._token_end == self._token_start:
            return
        per_chunk = self._planner.layers_per_chunk(self._group_idx, self._token_end - self._token_start)
        while (num_layers := min(per_chunk, layers_done - self._layers_cut)) > 0:
            if num_layers < per_chunk and layers_done < len(self._layers):
                break
            yield from self._boxes(self._layers_cut, self._layers_cut + num_layers)
            self._layers_cut += num_layers

    def _boxes(self, layer_start: int, layer_end: int) -> Iterator[_Box]:
        step = self._planner.tokens_per_chunk(self._group_idx, self._token_end - self._token_start)
        shards = self._planner.shards(self._group_idx)
        for token_start in range(self._token_start, self._token_end, step):
            token_end = min(token_start + step, self._token_end)
            num_bytes = self._planner.num_bytes(self._group_idx, layer_end - layer_start, token_end - token_start)
            where = layer_start, layer_end, token_start, token_end
            yield *where, num_bytes, self._group_idx, shards.start, shards.stop
