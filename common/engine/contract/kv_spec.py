"""What a token leaves behind in the KV cache, as rows of bytes. Pure: no torch, no IO.

Only attention knows what a plane means. The cache, the pool, the handoff and audits know groups, planes and rows.
"""

from dataclasses import dataclass
from math import prod

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
    shard: int | None = None  # the axis of `shape` that ranks split among them; None = each rank holds the whole row

    @property
    def row_bytes(self) -> int:
        return prod(self.shape) * BYTES_PER_ELEMENT[self.dtype]


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share a block table and have the same planes."""

    layers: tuple[int, ...]  # ascending numbers of the model's layers
    planes: tuple[Plane, ...]
    window: int = 0  # a token is read by itself and the window - 1 tokens after it; 0 = by all later ones

    @property
    def bytes_per_token_layer(self) -> int:
        """All planes of one token in one layer."""
        return sum(plane.row_bytes for plane in self.planes)

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

    @property
    def bytes_per_token(self) -> int:
        """One token in all layers."""
        return sum(group.bytes_per_token for group in self.groups)

    @property
    def bytes_per_block(self) -> int:
        """One block of each group."""
        return self.block_size * self.bytes_per_token
