"""What ranks that compute one model together say to each other within a step: `Collectives`."""

from collections.abc import Sequence
from typing import Protocol

import torch

from common.values.errors import PdserveError
from common.values.ranks import Rank


class RankLost(PdserveError):
    """Another rank died or was given up: no step of this worker can end any more."""


class Collectives(Protocol):
    """One rank's end. Every rank makes the same calls in the same order, each from its compute thread.

    A call returns when this rank has what the others computed, so all of them have got as far as the call.
    Raises RankLost.
    """

    @property
    def rank(self) -> Rank: ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's `x` [num_rows, size], in the ranks' order: the same bits everywhere. In place."""
        ...

    def gather(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """On rank 0 the columns of all ranks beside each other, [num_rows, sum(sizes)]; elsewhere `x` as it is.

        `x` is [num_rows, sizes[rank]].
        """
        ...
