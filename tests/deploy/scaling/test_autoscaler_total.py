"""The autoscaler with a bound on the workers of both pools together: who gives, who takes; on a virtual clock."""

import itertools

import pytest
from pydantic import ValidationError

from common.values.config import AutoscaleSettings
from common.values.messages import Role
from deploy.scaling.autoscale_mix import Decision
from deploy.scaling.autoscaler import Autoscaler, PoolLoad, WorkerLoad
from tests.deploy.scaling.load_model import ClusterModel

PREFILL, DECODE = Role.PREFILL, Role.DECODE
Decisions = dict[Role, Decision]
SETTINGS = AutoscaleSettings(prefill_max=6, decode_max=6)
IDLE = WorkerLoad(num_blocks=100, max_num_seqs=8, tokens_per_s=1000.0)


# ---- a limited total --------------------------------------------------------------------------------

FULL = WorkerLoad(num_running=8, num_blocks=100, max_num_seqs=8)
FIXED = AutoscaleSettings(prefill_max=5, decode_max=5, total_min=4, total_max=4)
NO_WORK = PoolLoad(2, (IDLE, IDLE))
FULL_DECODE = PoolLoad(2, (FULL, FULL), 6)


def watch_both(scaler: Autoscaler, loads: dict[Role, PoolLoad], start_s: float, duration_s: float) -> list[Decisions]:
    return [scaler.decide_both(loads, start_s + second) for second in range(int(duration_s) + 1)]


def test_at_the_total_a_pool_takes_what_the_other_can_spare_and_both_say_why() -> None:
    decided = watch_both(Autoscaler(FIXED), {PREFILL: NO_WORK, DECODE: FULL_DECODE}, 0.0, FIXED.shift_window_s)
    early, last_one = decided[:-1], decided[-1]
    assert not any(decision.is_change for decisions in early for decision in decisions.values())
    assert "has not been watched for 30 s" in early[-1][DECODE].reason
    assert (last_one[PREFILL].desired, last_one[DECODE].desired) == (1, 3)
    assert last_one[DECODE].reason.startswith("1 of prefill takes this role: for 5 s at least: 22 sequences")
    assert last_one[PREFILL].reason == ("1 goes to decode, which lacks workers: 0.0 needed on the mean of 30 s")


def test_a_pool_that_needs_what_it_has_gives_nothing() -> None:
    busy = PoolLoad(2, (WorkerLoad(num_running=1, tokens_per_s=1000.0),) * 2)
    decided = watch_both(Autoscaler(FIXED), {PREFILL: busy, DECODE: FULL_DECODE}, 0.0, 100)
    assert not any(decision.is_change for decisions in decided for decision in decisions.values())
    assert (
        "at the limit of 4 in both pools, and prefill can spare none (it lacks workers itself)"
        in decided[-1][DECODE].reason
    )


def test_a_pool_keeps_its_own_least() -> None:
    settings = AutoscaleSettings(prefill_min=2, prefill_max=5, decode_max=5, total_max=4)
    decided = watch_both(Autoscaler(settings), {PREFILL: NO_WORK, DECODE: FULL_DECODE}, 0.0, 100)
    assert not any(decision.is_change for decisions in decided for decision in decisions.values())


def test_room_below_the_total_is_filled_before_anybody_gives() -> None:
    settings = AutoscaleSettings(prefill_max=5, decode_max=9, total_max=5)
    decided = watch_both(Autoscaler(settings), {PREFILL: NO_WORK, DECODE: PoolLoad(2, (FULL, FULL), 6)}, 0.0, 5)
    assert (decided[-1][PREFILL].desired, decided[-1][DECODE].desired) == (2, 3)
    huge = {PREFILL: NO_WORK, DECODE: PoolLoad(2, (FULL, FULL), 20)}
    decided = watch_both(Autoscaler(settings), huge, 0.0, 30)
    assert (decided[5][PREFILL].desired, decided[5][DECODE].desired) == (2, 3)


def test_after_a_shift_both_pools_rest() -> None:
    """1. a shift; 2. the mix turns round at once; 3. nothing moves before the cooldown is over."""
    scaler = Autoscaler(FIXED)
    watch_both(scaler, {PREFILL: NO_WORK, DECODE: FULL_DECODE}, 0.0, 30)
    overrun = PoolLoad(1, (WorkerLoad(1, 9, 9000, tokens_per_s=1000.0),))
    idle = PoolLoad(3, (IDLE, IDLE, IDLE))
    decided = watch_both(scaler, {PREFILL: overrun, DECODE: idle}, 31.0, 60)
    moved = [second for second, decisions in enumerate(decided) if decisions[PREFILL].is_change]
    assert moved == [59]
    assert (decided[59][PREFILL].desired, decided[59][DECODE].desired) == (3, 1)


def test_a_pool_that_has_just_got_workers_gives_none_before_it_has_rested() -> None:
    scaler = Autoscaler(FIXED.model_copy(update={"up_cooldown_s": 0.0}))
    watch_both(scaler, {PREFILL: NO_WORK, DECODE: FULL_DECODE}, 0.0, 30)
    overrun = PoolLoad(1, (WorkerLoad(1, 9, 9000, tokens_per_s=1000.0),))
    decided = watch_both(scaler, {PREFILL: overrun, DECODE: PoolLoad(3, (IDLE,) * 3)}, 31.0, 60)
    assert [second for second, both in enumerate(decided) if both[DECODE].is_change] == [59]
    assert "decode can spare none (it rests for 1 s)" in decided[58][PREFILL].reason


def test_with_a_fixed_total_idle_pools_keep_their_workers() -> None:
    decided = watch_both(Autoscaler(FIXED), {PREFILL: NO_WORK, DECODE: NO_WORK}, 0.0, 400)
    assert not any(decision.is_change for decisions in decided for decision in decisions.values())
    assert "kept for a total of 4 in both pools: for 300 s at most" in decided[-1][PREFILL].reason


@pytest.mark.parametrize(
    "limits",
    [{"total_max": 1}, {"total_max": 3, "total_min": 4}, {"total_min": 99}, {"total_max": 3, "decode_min": 3}],
)
def test_totals_that_no_sizes_meet_are_refused(limits: dict[str, int]) -> None:
    with pytest.raises(ValidationError, match="total_m"):
        AutoscaleSettings(**limits)  # type: ignore[arg-type]


def fixed_cluster(total: int) -> ClusterModel:
    limits = {"prefill_max": total - 1, "decode_max": total - 1, "total_min": total, "total_max": total}
    model = ClusterModel(AutoscaleSettings(**limits))  # type: ignore[arg-type]
    for role in Role:
        model.pools[role].size = model.pools[role].num_ready = total // 2
    return model


def test_a_shifting_mix_moves_workers_and_no_start_is_needed() -> None:
    """1. long answers: decode takes over; 2. long prompts: prefill does; 3. long answers again. Always six workers."""
    model = fixed_cluster(6)
    model.prompt_tokens, model.decode_s = 100, 16.0
    model.run(300, requests_per_s=2.0)
    after_answers = model.pools[DECODE].size
    model.prompt_tokens, model.decode_s = 1800, 2.0
    model.run(300, requests_per_s=1.6)
    after_prompts = model.pools[PREFILL].size
    model.prompt_tokens, model.decode_s = 100, 16.0
    model.run(300, requests_per_s=2.0)
    assert (after_answers, after_prompts, model.pools[DECODE].size) == (5, 5, 5)
    assert {model.pools[PREFILL].size + model.pools[DECODE].size} == {6}
    assert all(sum(sizes) == 6 for sizes in sizes_over_time(model, (3, 3)))
    assert len(model.changes) <= 12  # each shift is one change of each pool
    assert model.ttft_s[-1][1] < model.settings.target_ttft_s


def test_a_steady_mix_never_flaps() -> None:
    """Loads at which one pool is always near its limit: at most one shift, whatever the rate."""
    for tenth in (5, 15, 25, 35):
        model = fixed_cluster(4)
        model.prompt_tokens, model.decode_s = 400, 8.0
        model.run(600, requests_per_s=tenth / 10)
        assert len(model.changes) <= 2, (tenth, model.changes)


def test_a_mix_that_swings_faster_than_the_cooldown_moves_no_more_than_the_cooldown_allows() -> None:
    model = fixed_cluster(4)
    for cycle in range(20):
        model.prompt_tokens, model.decode_s = ((100, 16.0), (1800, 2.0))[cycle % 2]
        model.run(20, requests_per_s=1.5)
    shifts = sorted({at_s for at_s, *_ in model.changes})
    assert all(later - earlier >= model.settings.up_cooldown_s for earlier, later in itertools.pairwise(shifts))


def sizes_over_time(model: ClusterModel, first: tuple[int, int]) -> list[tuple[int, ...]]:
    """Both sizes after each moment at which something changed."""
    sizes, found = dict(zip(Role, first, strict=True)), []
    for _, group in itertools.groupby(model.changes, key=lambda change: change[0]):
        sizes |= {role: desired for _, role, _, desired in group}
        found.append(tuple(sizes.values()))
    return found
