"""Gumbel-max: argmax(logits / temperature + noise) is a draw from the softmax.

Noise for a whole vocabulary is the dear part of a step (0.2 ms a row). Noise grows with the hashed bits alone, so with
the sum that one token reaches most tokens are ruled out by their bits, without a logarithm; what is left is drawn from
exactly as the whole row would be.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from common.engine.plan import SampleSpec
from common.sampling.filters import apply_filters
from common.sampling.noise import gumbel, gumbel_of, hash_with, key_halves


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
        floors: torch.Tensor,  # [num_drawn] float32: logit / temperature + noise of some token of the row
        keys: torch.Tensor,  # [2, num_drawn] int32: low and high half of each row's noise key
    ) -> list[torch.Tensor]:
        """Per drawn row the token ids (int32, ascending) among which the row's Gumbel-max surely is."""
        ...


@runtime_checkable
class DeviceDraws(DrawCandidates, Protocol):
    """What a device does besides, for logits that should not leave it; see `common.kernels.device_draws`."""

    def adjusted(self, logits: torch.Tensor, specs: Sequence[SampleSpec]) -> torch.Tensor:
        """`logits`, or a copy in which what `common.sampling.adjust` does is done to all rows."""
        ...

    def filter_candidates(
        self, logits: torch.Tensor, rows: Sequence[int], specs: Sequence[SampleSpec]
    ) -> list[tuple[torch.Tensor, float | None]]:
        """Per row the tokens that its filters may keep, and the `total` of `apply_filters`. After `best`."""
        ...


class TorchDraws:
    """The best of each row in torch operators."""

    def best(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return logits.amax(dim=-1), logits.argmax(dim=-1)


def draw(logits: torch.Tensor, spec: SampleSpec, vocab: torch.Tensor) -> torch.Tensor:
    """One row [vocab_size] with its filters; `vocab` int32 counts the row's tokens. Row by row: it stays in cache."""
    params = spec.params
    scaled, token_ids = apply_filters((logits / params.temperature, vocab), params)
    noise = gumbel(params.seed, spec.choice_idx, spec.position, token_ids)
    return token_ids[scaled.add_(noise).argmax()]


def draw_narrowed(
    logits: torch.Tensor,
    best_ids: torch.Tensor,  # [num_rows] int64
    specs: Sequence[SampleSpec],
    rows: Sequence[int],  # without filters, and finite
    draws: DrawCandidates,
) -> torch.Tensor:
    """`best_ids` with the rows of `rows` drawn instead, the same tokens as `draw` gives."""
    may_draw = logits.gather(1, best_ids.unsqueeze(1)).squeeze(1).isfinite().tolist()
    rows = [row for row in rows if may_draw[row]]
    if not rows:
        return best_ids
    row_ids = torch.tensor(rows)
    temperatures = torch.tensor([specs[row].params.temperature for row in rows])
    halves = [key_halves(specs[row].params.seed, specs[row].choice_idx, specs[row].position) for row in rows]
    keys = torch.tensor(halves, dtype=torch.int32).T.contiguous()
    best = best_ids[row_ids.to(best_ids.device)]
    best_logits = logits[row_ids.to(logits.device), best].cpu()
    floors = best_logits / temperatures + gumbel_of(hash_with(keys[0], keys[1], best.cpu().int()))
    found = draws.draw_candidates(logits, row_ids, temperatures, floors, keys)
    counts = torch.tensor([len(token_ids) for token_ids in found])
    token_ids, owner = torch.cat(found), torch.repeat_interleave(torch.arange(len(rows)), counts)
    noise = gumbel_of(hash_with(keys[0][owner], keys[1][owner], token_ids))
    found_logits = logits[row_ids[owner].to(logits.device), token_ids.long().to(logits.device)].cpu()
    sums = (found_logits / temperatures[owner]).add_(noise)
    drawn = token_ids[_best_of_each(sums, counts)]
    return best_ids.index_copy(0, row_ids.to(best_ids.device), drawn.long().to(best_ids.device))


def _best_of_each(values: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Where the first greatest of each run of `counts` values is, in `values` [sum(counts)]."""
    places = torch.arange(int(counts.max())) < counts.unsqueeze(1)
    runs = torch.full(places.shape, float("-inf")).masked_scatter_(places, values)
    return runs.argmax(dim=1) + counts.cumsum(0) - counts


def draw_filtered(
    logits: torch.Tensor,
    best_ids: torch.Tensor,  # [num_rows] int64
    specs: Sequence[SampleSpec],
    rows: Sequence[int],  # finite, with filters
    draws: DeviceDraws,
) -> torch.Tensor:
    """`best_ids` with the rows of `rows` drawn instead, the same tokens as `draw` gives."""
    may_draw = logits.gather(1, best_ids.unsqueeze(1)).squeeze(1).isfinite().tolist()
    rows = [row for row in rows if may_draw[row]]
    if not rows:
        return best_ids
    found = draws.filter_candidates(logits, rows, specs)
    counts = [len(token_ids) for token_ids, _ in found]
    owner = torch.repeat_interleave(torch.tensor(rows), torch.tensor(counts))
    token_ids = torch.cat([ids for ids, _ in found])
    kept_logits = logits[owner.to(logits.device), token_ids.long().to(logits.device)].cpu()
    drawn = [
        _draw_one(row_logits, ids, specs[row], total)
        for row, row_logits, (ids, total) in zip(rows, torch.split_with_sizes(kept_logits, counts), found, strict=True)
    ]
    on_device = (torch.tensor(values).to(best_ids.device) for values in (rows, drawn))
    return best_ids.index_copy(0, *on_device)


def _draw_one(logits: torch.Tensor, token_ids: torch.Tensor, spec: SampleSpec, total: float | None) -> int:
    params = spec.params
    scaled, token_ids = apply_filters((logits / params.temperature, token_ids), params, total)
    noise = gumbel(params.seed, spec.choice_idx, spec.position, token_ids)
    return int(token_ids[scaled.add_(noise).argmax()])
