"""Keeps what the pools want within the workers that there are together, by moving workers between them. Pure: no IO."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from common.values.messages import Role


@dataclass(frozen=True, slots=True)
class Decision:
    """What a pool should have, and why; equal sizes = leave it."""

    role: Role
    size: int
    desired: int
    need: float
    reason: str

    @property
    def is_change(self) -> bool:
        return self.desired != self.size


@dataclass(frozen=True, slots=True)
class Spare:
    """How many workers a pool could give to the other, and why no more."""

    num_workers: int
    reason: str


def within_total(
    wanted: Mapping[Role, Decision], spares: Mapping[Role, Spare], total_min: int, total_max: int
) -> dict[Role, Decision]:
    """The decisions for pools of `total_min` to `total_max` workers together; 0 = no limit.

    Shrinking comes first: what leaves one pool is room for the other. The room goes to the one that lacks most; one
    that does not grow gives what it can spare to one that must.
    """
    decided = _not_below(dict(wanted), total_min)
    if not total_max:
        return decided
    sizes, within = _filled(decided, total_max), dict(decided)
    for role, decision in decided.items():
        if sizes[role] < decision.desired:
            within |= _shifted(decision, decided[role.other], spares[role.other], sizes[role], total_max)
    return within


def _filled(decided: Mapping[Role, Decision], total_max: int) -> dict[Role, int]:
    """Sizes without a shift: growing pools have been given the room there is, one worker at a time."""
    sizes = {role: min(decision.size, decision.desired) for role, decision in decided.items()}
    for _ in range(total_max - sum(sizes.values())):
        growing = [role for role, decision in decided.items() if sizes[role] < decision.desired]
        if growing:
            sizes[max(growing, key=lambda role: decided[role].need - sizes[role])] += 1
    return sizes


def _shifted(growing: Decision, giving: Decision, spare: Spare, size: int, total_max: int) -> dict[Role, Decision]:
    """Let a pool that the room has brought to `size` take the rest from the other."""
    taken = min(growing.desired - size, spare.num_workers) if giving.desired == giving.size else 0
    name = giving.role.value
    if not taken:
        why = "it lacks workers itself" if giving.desired > giving.size else spare.reason
        text = f"at the limit of {total_max} in both pools, and {name} can spare none ({why}): {growing.reason}"
        return {growing.role: replace(growing, desired=size, reason=text)}
    text = f"{taken} of {name} take{'s' * (taken == 1)} this role: {growing.reason}"
    given = f"{taken} go{'es' * (taken == 1)} to {growing.role.value}, which lacks workers: {spare.reason}"
    return {
        growing.role: replace(growing, desired=size + taken, reason=text),
        giving.role: replace(giving, desired=giving.size - taken, reason=given),
    }


def _not_below(decided: dict[Role, Decision], total_min: int) -> dict[Role, Decision]:
    """Take back what would shrink the total below its least, of the pool that needs most first."""
    for role in sorted(Role, key=lambda role: decided[role].size - decided[role].need):
        decision = decided[role]
        missing = total_min - sum(other.desired for other in decided.values())
        if missing > 0 and decision.desired < decision.size:
            desired = min(decision.size, decision.desired + missing)
            reason = f"kept for a total of {total_min} in both pools: {decision.reason}"
            decided[role] = replace(decision, desired=desired, reason=reason)
    return decided
