"""What a device does to narrow draws down: the few tokens of each row among which a draw must be."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from common.engine.contract.plan import SampleSpec


class Candidates(NamedTuple):
    """Tokens of several rows, one at least of each, one row's after the other's, on the CPU."""

    token_ids: torch.Tensor  # [sum(counts)] int32, ascending in each row
    counts: list[int]


class DrawCandidates(Protocol):
    """What a device does in one pass over the logits; see `NativeOps`."""

    def best(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Per row the greatest logit, NaN where any is, and its first token id."""
        ...

    def draw_candidates(
        self,
        logits: torch.Tensor,  # [num_rows, vocab_size] float32
        rows: torch.Tensor,  # [num_drawn] int64
        temperatures: torch.Tensor,  # [num_drawn] float32
        best_ids: torch.Tensor,  # [num_drawn] int64: each row's best, on the device of the logits
        keys: torch.Tensor,  # [2, num_drawn] int32: low and high half of each row's noise key
    ) -> Candidates:
        """The tokens among which each drawn row's Gumbel-max surely is."""
        ...


@runtime_checkable
class DeviceDraws(DrawCandidates, Protocol):
    """What a device does besides, for logits that should not leave it; see `devices.triton.device_draws`."""

    def adjusted(self, logits: torch.Tensor, specs: Sequence[SampleSpec]) -> torch.Tensor:
        """`logits`, or a copy in which what `common.engine.sampling.adjust` does is done to all rows."""
        ...

    def filter_candidates(
        self, logits: torch.Tensor, rows: Sequence[int], specs: Sequence[SampleSpec]
    ) -> list[tuple[torch.Tensor, float | None]]:
        """Per row the tokens that its filters may keep, and the `total` of `apply_filters`. After `best`."""
        ...
