"""Which part of a worker's model this is. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rank:
    """One of `world_size` processes that together run one model; each holds a shard of its weights and its KV."""

    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} of {self.world_size}")


WHOLE = Rank()  # a model in one process
