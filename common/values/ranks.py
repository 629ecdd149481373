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

    def held(self, count: int) -> range:
        """Which of `count` like pieces this rank holds: neighbours, and of each rank's numbers none differ by over one.

        Of fewer pieces than ranks each is held by several.
        """
        first = self.rank * count // self.world_size
        return range(first, max(first + 1, (self.rank + 1) * count // self.world_size))


WHOLE = Rank()  # a model in one process


def ranks_of(world_size: int) -> tuple[Rank, ...]:
    """All ranks of a worker, in their order."""
    return tuple(Rank(rank, world_size) for rank in range(world_size))
