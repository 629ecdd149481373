"""`sample`: one token per row of logits.

Rows are independent: what a row draws depends on its logits and its spec only, not on its place or its company.
A row that is not finite is an error of that row alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from common.engine.contract.draws import DeviceDraws, DrawCandidates
from common.engine.contract.plan import SampleSpec
from common.engine.sampling.adjust import FORBIDDEN, adjust, needs_adjustment
from common.engine.sampling.draw import TorchDraws, draw, draw_filtered, draw_narrowed
from common.engine.sampling.filters import has_filters
from common.engine.sampling.guided import Allowed, within_grammars
from common.engine.sampling.logprobs import logprobs_of
from common.values.request import SampledToken

NOTHING_GUIDED: Allowed = MappingProxyType({})
GREEDY_BELOW = 1e-5  # temperatures that would only amplify rounding
_MAX_SCALED = 1e38  # below float32's largest number, with room for the noise


@dataclass(frozen=True, slots=True)
class SampleError:
    """Why a row has no token."""

    reason: str


def sample(
    logits: torch.Tensor,
    specs: Sequence[SampleSpec],
    draws: DrawCandidates | None = None,
    allowed: Allowed = NOTHING_GUIDED,
) -> list[SampledToken | SampleError]:
    """Draw one token per row of `logits` [len(specs), vocab_size] float32, which is left unchanged.

    `draws` speeds draws from the whole vocabulary up and changes none. `allowed`: the rows under a grammar.
    Logprobs are of the raw logits: before penalties, bias, temperature and filters, as OpenAI and vLLM report them.
    """
    assert logits.shape[0] == len(specs), f"{logits.shape[0]} rows for {len(specs)} specs"
    if not specs:
        return []
    best, best_ids = (draws or TorchDraws()).best(logits)
    # The best is NaN where any logit is: one pass finds NaN, +inf and rows that are -inf throughout.
    bests = best.tolist()
    is_finite = list(map(math.isfinite, bests))
    device = draws if isinstance(draws, DeviceDraws) else None
    guided = within_grammars(logits, allowed)
    picking = device.adjusted(guided, specs) if device is not None else _adjusted(guided, specs)
    if picking is not logits:
        best, best_ids = (draws or TorchDraws()).best(picking)
        if dead_ends := [row for row in allowed if best[row] == FORBIDDEN]:
            # The grammar leaves only what other rules forbid, as the end before min_tokens: the grammar counts.
            picking = picking.index_copy(0, *_rows_of(guided, dead_ends))
            best, best_ids = (draws or TorchDraws()).best(picking)
        bests = best.tolist()
    may_draw = [
        row_is_finite and not isinstance(allowed.get(row), str) and _stays_finite(value, spec)
        for row, (row_is_finite, value, spec) in enumerate(zip(is_finite, bests, specs, strict=True))
    ]
    token_ids = _pick(picking, best_ids, specs, may_draw, draws, device)
    logprobs = logprobs_of(logits, token_ids, specs)
    return [
        SampledToken(token_id, *logprobs.get(row, ())) if may_draw[row] else _error(is_finite[row], allowed.get(row))
        for row, token_id in enumerate(token_ids.tolist())
    ]


def _rows_of(logits: torch.Tensor, rows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(numbers, contents) of some rows."""
    numbers = torch.tensor(rows, device=logits.device)
    return numbers, logits[numbers]


def is_greedy(spec: SampleSpec) -> bool:
    return spec.params.temperature < GREEDY_BELOW


def _stays_finite(best: float, spec: SampleSpec) -> bool:
    """Whether a row's best logit is finite, divided by the temperature too."""
    return math.isfinite(best) and (is_greedy(spec) or abs(best) <= _MAX_SCALED * spec.params.temperature)


def _error(is_finite: bool, allowed: object) -> SampleError:
    if isinstance(allowed, str):
        return SampleError(f"guided decoding: {allowed}")
    return SampleError("no token may be drawn" if is_finite else "logits are not finite")


def _adjusted(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> torch.Tensor:
    rows = [row for row, spec in enumerate(specs) if needs_adjustment(spec)]
    if not rows:
        return logits
    logits = logits.clone()
    for row in rows:
        logits[row] = adjust(logits[row], specs[row])
    return logits


def _pick(
    logits: torch.Tensor,
    best_ids: torch.Tensor,  # [num_rows] int64: argmax of each row that may be drawn from
    specs: Sequence[SampleSpec],
    may_draw: Sequence[bool],
    draws: DrawCandidates | None,
    device: DeviceDraws | None,
) -> torch.Tensor:
    """[num_rows] int64: the best for greedy rows, Gumbel-max for the others, anything where no token may be drawn."""
    drawn_rows = [row for row, spec in enumerate(specs) if may_draw[row] and not is_greedy(spec)]
    if draws is not None:
        narrow_rows = [row for row in drawn_rows if not has_filters(specs[row].params)]
        best_ids = draw_narrowed(logits, best_ids, specs, narrow_rows, draws)
        drawn_rows = [row for row in drawn_rows if has_filters(specs[row].params)]
    if device is not None:
        return draw_filtered(logits, best_ids, specs, drawn_rows, device)
    if drawn_rows:
        best_ids = best_ids.clone()
        vocab = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
        for row in drawn_rows:
            best_ids[row] = draw(logits[row], specs[row], vocab)
    return best_ids
