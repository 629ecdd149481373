"""How a limited total is shared between pools that want more than it has."""

import pytest

from common.values.messages import Role
from deploy.scaling.autoscale_mix import Decision, Spare, within_total

PREFILL, DECODE = Role.PREFILL, Role.DECODE
NONE = Spare(0, "busy")


def decision(role: Role, size: int, desired: int, need: float) -> Decision:
    return Decision(role, size, desired, need, "load")


@pytest.mark.parametrize(
    ("total_max", "sizes"),
    [(2, (1, 1)), (3, (2, 1)), (4, (2, 2)), (5, (3, 2)), (9, (3, 2))],
)
@pytest.mark.parametrize("first", [PREFILL, DECODE])
def test_room_goes_to_whoever_lacks_most(first: Role, total_max: int, sizes: tuple[int, int]) -> None:
    second = DECODE if first is PREFILL else PREFILL
    wanted = {first: decision(first, 1, 3, 2.7), second: decision(second, 1, 2, 1.9)}
    within = within_total(wanted, {PREFILL: NONE, DECODE: NONE}, 0, total_max)
    assert (within[first].desired, within[second].desired) == sizes
    cut = [role for role in Role if within[role].desired < wanted[role].desired]
    assert all("can spare none (it lacks workers itself): load" in within[role].reason for role in cut)


@pytest.mark.parametrize("role", [PREFILL, DECODE])
def test_a_pool_that_may_not_grow_gives_nothing_whatever_it_needed_before(role: Role) -> None:
    """Both have just begun to lack workers, so that the mean of the longer window is still low."""
    wanted = {PREFILL: decision(PREFILL, 2, 3, 2.5), DECODE: decision(DECODE, 2, 3, 2.5)}
    within = within_total(wanted, {PREFILL: Spare(1, "idle"), DECODE: Spare(1, "idle")}, 0, 4)
    assert within[role].desired == 2


def test_what_one_pool_gives_up_is_room_for_the_other() -> None:
    wanted = {PREFILL: decision(PREFILL, 2, 4, 3.5), DECODE: decision(DECODE, 2, 1, 0.5)}
    within = within_total(wanted, {PREFILL: NONE, DECODE: Spare(1, "idle")}, 0, 4)
    assert (within[PREFILL].desired, within[DECODE].desired) == (3, 1)
