"""Which worker gets a request: costs, the choice among them, and the record of why. Pure: no IO, no state.

Prefill: the time until the prompt would be computed there,

    cost_s = (uncached tokens waiting + uncached tokens of this prompt) / tokens per second

Decode: how much of the worker the request would find taken, plus what it would have to bring,

    cost = occupied blocks / blocks + sequences / max sequences + MISSING_WEIGHT * missing tokens / tokens

A prompt that only a decode worker has been chosen for may be computed there as well, when that takes clearly less time
than any prefill worker would need: `choose_prefiller`. What prompts wait where is counted in both. No data is not idle:
while one of them is not known, prefill workers keep the prompt.

The cheapest wins; near ties go to the worker that was chosen longest ago. A worker whose share of the recent
placements is over its bound yields to the others, as long as they are not busy: a prefix that everybody asks for
then spreads, instead of pulling all requests to its first owner.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from common.values.messages import Role

# Speed of a worker that has not reported one yet; any value does, it only orders workers by waiting tokens.
DEFAULT_TOKENS_PER_S = 1000.0
# A missing prompt costs as much as half a worker's blocks being taken: a cached prefix wins between equal loads.
MISSING_WEIGHT = 0.5
# Costs this close count as equal: speeds are measured and jitter.
TIE_RATIO = 0.05
TIE_COST = 0.001
# At most this multiple of an equal share goes to one worker (two workers: 75 %).
MAX_SHARE_FACTOR = 1.5
# With fewer recent placements than this there is no hot spot; one slow conversation may stay where its prefix is.
MIN_RECENT_PLACEMENTS = 8.0
RECENT_HALF_LIFE_S = 10.0
# A worker with more load than this does not relieve a hot one: seconds of waiting prefill, taken share of decode.
MAX_RELIEF_LOAD = {Role.PREFILL: 1.0, Role.DECODE: 1.0}


# A decode worker prefills only when a prefill worker would take this many times as long: it has streams to keep up.
MIN_GAIN = 2.5
# What a worker reported longer ago says nothing of its load; they report four times a second.
MAX_REPORT_AGE_S = 2.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """One worker as it stood when a request was placed.

    `refusal` says why it could not be chosen, `unknown` why its cost is a guess; empty = neither.
    """

    worker_id: str
    num_ranks: int = 1
    cost: float = 0.0
    load: float = 0.0  # the part of the cost that others cause
    num_cached_tokens: int = 0
    recent_placements: float = 0.0
    last_chosen: int = 0
    refusal: str = ""
    unknown: str = ""


@dataclass(frozen=True, slots=True)
class RoutingDecision:
    """A choice with everything it was based on. `chosen` indexes `candidates`; None = the request waits."""

    role: Role
    attempt: int
    at_s: float
    candidates: tuple[Candidate, ...]
    chosen: int | None
    why: str


def prefill_cost_s(num_waiting_tokens: int, num_uncached_tokens: int, tokens_per_s: float) -> float:
    """Seconds until a prompt with so many uncached tokens would be computed."""
    return (num_waiting_tokens + num_uncached_tokens) / (tokens_per_s or DEFAULT_TOKENS_PER_S)


def choose_prefiller(there: Sequence[Candidate], here: Candidate) -> tuple[int, str]:
    """Index in `(*there, here)` of who computes a prompt: a prefill worker, or the decode worker that has it anyway."""
    open_idx = [idx for idx, candidate in enumerate(there) if not candidate.refusal]
    if not open_idx:
        return len(there), "no prefill worker takes it now"
    cheapest = min(open_idx, key=lambda idx: there[idx].cost)
    for candidate in (here, *(there[idx] for idx in open_idx)):
        if candidate.unknown:
            return cheapest, f"blind: {candidate.worker_id} {candidate.unknown}"
    if here.cost * MIN_GAIN < there[cheapest].cost:
        return len(there), "sooner than a prefill worker"
    return cheapest, "sooner than the decode worker, or nearly"


def decode_load(num_occupied_blocks: int, num_blocks: int, num_sequences: int, max_num_seqs: int) -> float:
    """How much of a decode worker is taken; 2 = all blocks and all places in a step."""
    return num_occupied_blocks / num_blocks + num_sequences / max_num_seqs


def decode_cost(load: float, num_missing_tokens: int, num_tokens: int) -> float:
    """The load, plus the missing part of the prompt."""
    return load + MISSING_WEIGHT * num_missing_tokens / num_tokens


def decayed(placements: float, age_s: float) -> float:
    """A count of placements `age_s` later."""
    return float(placements * 0.5 ** (age_s / RECENT_HALF_LIFE_S))


def choose(role: Role, candidates: Sequence[Candidate]) -> tuple[int | None, str]:
    """Index of the worker that gets the request, and why in a few words; (None, ...) when none can take it."""
    open_idx = [idx for idx, candidate in enumerate(candidates) if not candidate.refusal]
    if not open_idx:
        return None, "no worker can take it now"
    cool_idx = [idx for idx in open_idx if not _is_hot(candidates[idx], candidates, role, open_idx)]
    considered = cool_idx or open_idx
    cheapest = min(candidates[idx].cost for idx in considered)
    near = [idx for idx in considered if candidates[idx].cost <= cheapest * (1 + TIE_RATIO) + TIE_COST]
    chosen = min(near, key=lambda idx: candidates[idx].last_chosen)
    why = "lowest cost" if len(near) == 1 else "least recently chosen among equals"
    return chosen, why if len(considered) == len(open_idx) else f"{why}, relieving a hot spot"


def _is_hot(candidate: Candidate, candidates: Sequence[Candidate], role: Role, open_idx: Sequence[int]) -> bool:
    """True when the worker had more than its share lately and another one, not busy, can step in."""
    total = sum(candidates[idx].recent_placements for idx in open_idx)
    if total < MIN_RECENT_PLACEMENTS or len(open_idx) < 2:
        return False
    bound = MAX_SHARE_FACTOR / len(open_idx) * (total + 1)
    if candidate.recent_placements + 1 <= bound:
        return False
    others = (candidates[idx] for idx in open_idx if candidates[idx] is not candidate)
    return any(other.load <= MAX_RELIEF_LOAD[role] for other in others)
