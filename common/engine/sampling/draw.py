"""Gumbel-max: argmax(logits / temperature + noise) is a draw from the softmax.

Noise for a whole vocabulary is the dear part of a step (0.2 ms a row). Noise grows with the hashed bits alone, so with
the sum that one token reaches most tokens are ruled out by their bits, without a logarithm; what is left is drawn from
exactly as the whole row would be. A device may leave one token of most rows: then nothing is left to draw.
"""

from collections.abc import Iterator, Sequence

import torch

from common.engine.contract.draws import DeviceDraws, DrawCandidates
from common.engine.contract.plan import SampleSpec
from common.engine.sampling.filters import apply_filters
from common.engine.sampling.noise import gumbel, gumbel_of, hash_with, key_halves


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
    rows: Sequence[int],  # that may be drawn from, without filters
    draws: DrawCandidates,
) -> torch.Tensor:
    """`best_ids` with the rows of `rows` drawn instead, the same tokens as `draw` gives."""
    if not rows:
        return best_ids
    row_ids = torch.tensor(rows)
    temperatures = torch.tensor([specs[row].params.temperature for row in rows])
    halves = [key_halves(specs[row].params.seed, specs[row].choice_idx, specs[row].position) for row in rows]
    keys = torch.tensor(halves, dtype=torch.int32).T.contiguous()
    best = best_ids[row_ids.to(best_ids.device)]
    token_ids, counts = draws.draw_candidates(logits, row_ids, temperatures, best, keys)
    assert min(counts) > 0, f"rows without a candidate: {counts}"
    if len(token_ids) > len(rows):
        # A list, because `torch.repeat_interleave` wakes all threads for a few numbers.
        owner = torch.tensor([idx for idx, count in enumerate(counts) for _ in range(count)])
        low, high = keys[:, owner]
        found_logits = logits[row_ids[owner].to(logits.device), token_ids.long().to(logits.device)].cpu()
        sums = (found_logits / temperatures[owner]).add_(gumbel_of(hash_with(low, high, token_ids)))
        token_ids = token_ids[list(_best_of_each(sums.tolist(), counts))]
    return best_ids.index_copy(0, row_ids.to(best_ids.device), token_ids.long().to(best_ids.device))


def _best_of_each(values: Sequence[float], counts: Sequence[int]) -> Iterator[int]:
    """Where the first greatest of each run of `counts` values is."""
    start = 0
    for count in counts:
        yield max(range(start, start + count), key=values.__getitem__)
        start += count


def draw_filtered(
    logits: torch.Tensor,
    best_ids: torch.Tensor,  # [num_rows] int64
    specs: Sequence[SampleSpec],
    rows: Sequence[int],  # that may be drawn from, with filters
    draws: DeviceDraws,
) -> torch.Tensor:
    """`best_ids` with the rows of `rows` drawn instead, the same tokens as `draw` gives."""
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
