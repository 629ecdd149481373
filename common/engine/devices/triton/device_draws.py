"""`DeviceDraws` by Triton kernels: penalties in one launch, and the few tokens of each row among which a draw must be.

Only those few leave the device. What is then drawn is computed by `sampling` on the CPU, so a token does not
depend on the device, except where logits do.
"""

import math
from collections import Counter
from collections.abc import Sequence

import torch

from common.engine.contract.draws import Candidates
from common.engine.contract.plan import SampleSpec
from common.engine.devices.triton.sampling import adjust_logits, may_draw, row_best
from common.engine.sampling.adjust import FORBIDDEN, needs_adjustment, penalty_of
from common.engine.sampling.noise import gumbel_of, hash_with
from common.values.request import SamplingParams

# Wider than the rounding of anything that a floor is computed from or compared with.
ABSOLUTE_MARGIN, RELATIVE_MARGIN = 1e-3, 4e-6


class TritonDraws:
    """Keeps the maxima of parts of the logits that `best` was asked for last, which `top_k` needs."""

    def __init__(self) -> None:
        self._logits: torch.Tensor | None = None
        self._part_best = torch.empty(0)

    def best(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Per row of float32 [num_rows, vocab_size]: the greatest logit, not finite where any is NaN, and its token."""
        values, token_ids, self._part_best = row_best(logits)
        self._logits = logits
        return values, token_ids

    def adjusted(self, logits: torch.Tensor, specs: Sequence[SampleSpec]) -> torch.Tensor:
        """`logits`, or a copy in which penalties, biases and forbidden tokens of all rows are applied."""
        rows = [row for row, spec in enumerate(specs) if needs_adjustment(spec)]
        if not rows:
            return logits
        logits = logits.clone(memory_format=torch.contiguous_format)
        entries = [entry for row in rows for entry in _entries(row * logits.shape[1], specs[row])]
        if entries:
            places, *values = zip(*entries, strict=True)
            numbers = torch.tensor(values, dtype=torch.float32).to(logits.device, non_blocking=True)
            adjust_logits(logits, torch.tensor(places, dtype=torch.int64).to(logits.device, non_blocking=True), numbers)
        for row in rows:
            if allowed := specs[row].params.allowed_token_ids:
                token_ids = torch.tensor(allowed, dtype=torch.int64).to(logits.device)
                kept = logits[row, token_ids]
                logits[row].fill_(FORBIDDEN).index_copy_(0, token_ids, kept)
        return logits

    def draw_candidates(
        self,
        logits: torch.Tensor,  # [num_rows, vocab_size] float32
        rows: torch.Tensor,  # [num_drawn] int64, on the CPU as temperatures and keys are
        temperatures: torch.Tensor,  # [num_drawn] float32
        best_ids: torch.Tensor,  # [num_drawn] int64: each row's best, on the device of the logits
        keys: torch.Tensor,  # [2, num_drawn] int32: low and high half of each row's noise key
    ) -> Candidates:
        """The tokens among which each drawn row's Gumbel-max surely is."""
        best_logits = logits[rows.to(logits.device), best_ids].cpu()
        floors = best_logits / temperatures + gumbel_of(hash_with(keys[0], keys[1], best_ids.cpu().int()))
        floors = floors - ABSOLUTE_MARGIN - RELATIVE_MARGIN * floors.abs()
        on_device = (x.to(logits.device, non_blocking=True) for x in (rows, floors, temperatures, keys))
        return _candidates(may_draw(logits, *on_device))

    def filter_candidates(
        self, logits: torch.Tensor, rows: Sequence[int], specs: Sequence[SampleSpec]
    ) -> list[tuple[torch.Tensor, float | None]]:
        """Per row (token ids, int32, ascending, on the CPU; log of the sum of the whole row's exponentials, or None).

        The ids hold every token that min_p and top_k keep; or, for top_p alone, those above its least probability, with
        the sum, which top_p needs. `logits` are those that `best` was asked for last.
        """
        assert self._logits is logits, "best was not asked for these logits"
        params = [specs[row].params for row in rows]
        row_ids = torch.tensor(rows).to(logits.device)
        temperatures = torch.tensor([one.temperature for one in params]).to(logits.device)
        totals = self._totals(logits, row_ids, temperatures, params)
        part_best = self._part_best[row_ids]
        floors = torch.stack([_floor(part_best[idx], totals[idx], logits, one) for idx, one in enumerate(params)])
        floors = floors - ABSOLUTE_MARGIN * temperatures - RELATIVE_MARGIN * floors.abs()
        found = torch.split_with_sizes(*_candidates(may_draw(logits, row_ids, floors)))
        sums = torch.stack(totals).tolist()
        return [
            (ids, total if _is_top_p_alone(one) else None) for ids, total, one in zip(found, sums, params, strict=True)
        ]

    def _totals(
        self, logits: torch.Tensor, rows: torch.Tensor, temperatures: torch.Tensor, params: Sequence[SamplingParams]
    ) -> list[torch.Tensor]:
        """Per row the log of the sum of exponentials where top_p needs it, else 0."""
        return [
            (logits[rows[idx]] / temperatures[idx]).logsumexp(0) if _is_top_p_alone(one) else temperatures[idx] * 0
            for idx, one in enumerate(params)
        ]


def _is_top_p_alone(params: SamplingParams) -> bool:
    return params.top_p < 1.0 and params.top_k == 0 and params.min_p == 0.0


def _floor(part_best: torch.Tensor, total: torch.Tensor, logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """A logit that every token which a row's filters keep reaches, but for rounding.

    top_k: as many tokens as there are parts at or above the k-th best maximum of a part, so the k-th best token is not
    below it. top_p: what is less likely than (1 - top_p) / vocab_size is less than 1 - top_p even all together.
    """
    floors = [torch.full_like(total, -3e38)]
    if params.min_p > 0.0:
        floors.append(part_best.max() + math.log(params.min_p) * params.temperature)
    if 0 < params.top_k <= part_best.shape[0]:
        floors.append(part_best.topk(params.top_k).values[-1].clamp(min=-3e38))
    if _is_top_p_alone(params):
        floors.append((total + math.log((1.0 - params.top_p) / logits.shape[1]) - 1.0) * params.temperature)
    return torch.stack(floors).max()


def _candidates(may: torch.Tensor) -> Candidates:
    """Each row's set tokens: one wait for the device."""
    rows, token_ids = may.nonzero().to("cpu").unbind(1)
    counts = torch.bincount(rows, minlength=may.shape[0])
    return Candidates(token_ids.int(), counts.tolist())


def _entries(first: int, spec: SampleSpec) -> list[tuple[float, ...]]:
    """(place, repetition penalty, what is taken off, bias, 1 if forbidden) of every token of a row that changes."""
    params = spec.params
    seen = set(spec.token_ids) if params.repetition_penalty != 1.0 else set()
    counts = Counter(spec.token_ids[spec.num_prompt_tokens :]) if params.has_penalties else Counter()
    biases = dict(params.logit_bias or ())
    banned = set(spec.banned_token_ids)
    taken_off = penalty_of(counts, params)
    return [
        (
            first + token_id,
            params.repetition_penalty if token_id in seen else 1.0,
            taken_off.get(token_id, 0.0),
            biases.get(token_id, 0.0),
            float(token_id in banned),
        )
        for token_id in sorted(seen | counts.keys() | biases.keys() | banned)
    ]
