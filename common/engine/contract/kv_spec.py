"""What a token leaves behind in the KV cache, as rows of bytes. Pure: no torch, no IO.

Only attention knows what a plane means. The cache, the pool, the handoff and audits know groups, planes and rows.
"""

from dataclasses import dataclass, replace
from math import prod

from common.values.ranks import Rank

BYTES_PER_ELEMENT = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int8": 1,
    "float8_e4m3fn": 1,
}


@dataclass(frozen=True, slots=True)
class Plane:
    """One kind of row. `shape` is the row of one token in one layer, such as [num_kv_heads, head_dim]."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # as torch names it, without "torch."
    is_sharded: bool = False  # ranks split the first axis of `shape` (heads) among them; else each holds the whole row

    @property
    def row_bytes(self) -> int:
        return prod(self.shape) * BYTES_PER_ELEMENT[self.dtype]

    @property
    def num_shards(self) -> int:
        """Equal pieces of a row that ranks may split: heads, or 1."""
        return self.shape[0] if self.is_sharded else 1

    def __str__(self) -> str:
        return f"{self.name} {'x'.join(map(str, self.shape))} {self.dtype}"


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share a block table and have the same planes."""

    layers: tuple[int, ...]  # ascending numbers of the model's layers
    planes: tuple[Plane, ...]
    window: int = 0  # a token is read by itself and the window - 1 tokens after it; 0 = by all later ones

    def __post_init__(self) -> None:
        assert self.layers, "a group without layers"
        assert len({(plane.is_sharded, plane.num_shards) for plane in self.planes}) == 1, (
            "planes that split differently"
        )

    @property
    def is_sharded(self) -> bool:
        return self.planes[0].is_sharded

    @property
    def num_shards(self) -> int:
        """Of each of its planes."""
        return self.planes[0].num_shards

    def held(self, rank: Rank) -> range:
        """The shards that a rank holds. Of fewer shards than ranks each is held by several."""
        return rank.held(self.num_shards) if self.is_sharded else range(1)

    def of_rank(self, rank: Rank) -> "KVGroup":
        """With what a rank holds of each row."""
        if not self.is_sharded:
            return self
        count = len(self.held(rank))
        return replace(self, planes=tuple(replace(each, shape=(count, *each.shape[1:])) for each in self.planes))

    @property
    def bytes_per_token_layer(self) -> int:
        """All planes of one token in one layer."""
        return sum(plane.row_bytes for plane in self.planes)

    def first_token_needed(self, num_tokens: int) -> int:
        """The first of `num_tokens` tokens that any later one reads."""
        return first_token_needed(num_tokens, self.window)

    def __str__(self) -> str:
        window = f" window {self.window}" if self.window else ""
        return f"layers {_ranges(self.layers)}{window}: {', '.join(map(str, self.planes))}"

    @property
    def bytes_per_token(self) -> int:
        return len(self.layers) * self.bytes_per_token_layer


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Everything that two workers must agree on, except `block_size`, before one can use the other's KV."""

    block_size: int
    groups: tuple[KVGroup, ...]

    @property
    def num_layers(self) -> int:
        return sum(len(group.layers) for group in self.groups)

    def of_rank(self, rank: Rank) -> "KVSpec":
        """With what a rank holds of each row."""
        return replace(self, groups=tuple(group.of_rank(rank) for group in self.groups))

    @property
    def group_of_layer(self) -> tuple[int, ...]:
        """The index of each layer's group."""
        by_layer = {layer: idx for idx, group in enumerate(self.groups) for layer in group.layers}
        return tuple(by_layer[layer] for layer in range(self.num_layers))

    @property
    def bytes_per_token(self) -> int:
        """One token in all layers."""
        return sum(group.bytes_per_token for group in self.groups)

    @property
    def bytes_per_block(self) -> int:
        """One block of each group."""
        return self.block_size * self.bytes_per_token


def first_token_needed(num_tokens: int, window: int) -> int:
    """The first of `num_tokens` tokens that any later one reads; 0 without a window."""
    return max(0, num_tokens - window + 1) if window else 0


def _ranges(numbers: tuple[int, ...]) -> str:
    """0, 1, 2, 5 as 0-2 5"""
    starts = [number for number in numbers if number - 1 not in numbers]
    ends = [number for number in numbers if number + 1 not in numbers]
    return " ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
