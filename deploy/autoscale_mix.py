"""Keeps what the pools want within the workers that there are together, by moving workers between them. Pure: no IO."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from common.messages import Role


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

    Shrinking comes first: what leaves one pool is room for the other. Whoever must grow beyond the room takes what the
    other can spare.
    """
    decided = _not_below(dict(wanted), total_min)
    if not total_max:
        return decided
    for role in sorted(Role, key=lambda role: wanted[role].size - wanted[role].need):  # who lacks most comes first
        decision = decided[role]
        if decision.desired <= decision.size:
            continue
        rest = sum(other.desired for other in decided.values()) - decision.desired
        room = max(0, total_max - rest - decision.size)
        if decision.size + room >= decision.desired:
            continue
        decided |= _shifted(decision, decided[_other(role)], spares[_other(role)], room, total_max)
    return decided


def _shifted(growing: Decision, giving: Decision, spare: Spare, room: int, total_max: int) -> dict[Role, Decision]:
    """Fill the room, then take from the other pool."""
    lacking = growing.desired - growing.size - room
    taken = min(lacking, spare.num_workers) if giving.desired == giving.size else 0
    desired = growing.size + room + taken
    name = giving.role.value
    if taken:
        text = f"{taken} of {name} take{'s' * (taken == 1)} this role: {growing.reason}"
        given = f"{taken} go{'es' * (taken == 1)} to {growing.role.value}, which lacks workers: {spare.reason}"
        giving = replace(giving, desired=giving.size - taken, reason=given)
    else:
        why = "it lacks workers itself" if giving.desired > giving.size else spare.reason
        text = f"at the limit of {total_max} in both pools, and {name} can spare none ({why}): {growing.reason}"
    return {growing.role: replace(growing, desired=desired, reason=text), giving.role: giving}


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


def _other(role: Role) -> Role:
    return Role.DECODE if role is Role.PREFILL else Role.PREFILL
