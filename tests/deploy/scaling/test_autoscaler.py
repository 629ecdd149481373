"""The autoscaler: loads in, sizes and reasons out; on a virtual clock."""

import random
from dataclasses import replace

import pytest
from pydantic import ValidationError

from common.values.config import AutoscaleSettings
from common.values.messages import Role
from deploy.scaling.autoscale_mix import Decision
from deploy.scaling.autoscaler import NUM_REMEMBERED, Autoscaler, PoolLoad, WorkerLoad
from tests.deploy.scaling.load_model import ClusterModel

PREFILL, DECODE = Role.PREFILL, Role.DECODE
Decisions = dict[Role, Decision]
SETTINGS = AutoscaleSettings(prefill_max=6, decode_max=6)
IDLE = WorkerLoad(num_blocks=100, max_num_seqs=8, tokens_per_s=1000.0)


def watch(scaler: Autoscaler, role: Role, load: PoolLoad, start_s: float, duration_s: float) -> list[Decision]:
    """The same load, seen every second; the size follows what is decided."""
    return [scaler.decide(role, load, start_s + second) for second in range(int(duration_s) + 1)]


def last(role: Role, load: PoolLoad, settings: AutoscaleSettings = SETTINGS) -> Decision:
    """What is decided as soon as the load has lasted for the window."""
    return watch(Autoscaler(settings), role, load, 0.0, settings.up_window_s)[-1]


# ---- no data ----------------------------------------------------------------------------------------

NAN = float("nan")


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize(
    "load",
    [
        PoolLoad(4, ()),
        PoolLoad(4, (IDLE,)),
        PoolLoad(4, (IDLE, IDLE, IDLE, replace(IDLE, num_running=-1))),
        PoolLoad(4, (IDLE, IDLE, IDLE, replace(IDLE, num_blocks_used=101))),
        PoolLoad(4, (IDLE, IDLE, IDLE, replace(IDLE, tokens_per_s=NAN))),
        PoolLoad(4, (IDLE, IDLE, IDLE, replace(IDLE, step_s=float("inf")))),
        PoolLoad(4, (IDLE,) * 4, num_queued=-3),
    ],
    ids=["none", "few", "negative", "impossible", "not a number", "infinite", "negative queue"],
)
def test_a_pool_that_is_not_seen_is_held_and_says_so(role: Role, load: PoolLoad) -> None:
    """For many windows, and for one more after everything is seen again."""
    scaler = Autoscaler(SETTINGS)
    window_s = SETTINGS.stable_window_s
    watched = watch(scaler, role, load, 0.0, 5 * window_s)
    assert {decision.desired for decision in watched} == {4}
    assert all(decision.reason.startswith("held, blind: ") for decision in watched)
    seen = watch(scaler, role, PoolLoad(4, (IDLE,) * 4), 5 * window_s + 1, window_s + 2)
    assert {decision.desired for decision in seen[: int(window_s)]} == {4}
    assert min(decision.desired for decision in seen) == 1


def test_a_pool_that_is_not_seen_gives_none_to_the_other() -> None:
    settings = AutoscaleSettings(prefill_max=6, decode_max=6, total_max=8)
    scaler = Autoscaler(settings)
    busy = WorkerLoad(num_running=8, num_waiting=20, num_blocks=100, max_num_seqs=8)
    loads = {PREFILL: PoolLoad(4, (IDLE,)), DECODE: PoolLoad(4, (busy,) * 4)}
    decided = [scaler.decide_both(loads, float(second)) for second in range(int(settings.shift_window_s) + 60)]
    assert {(each[PREFILL].desired, each[DECODE].desired) for each in decided} == {(4, 4)}
    assert "blind: 1 of 4 workers report" in decided[-1][DECODE].reason


def test_a_load_that_is_too_much_for_those_that_report_is_answered_when_the_others_are_back() -> None:
    busy = WorkerLoad(num_running=8, num_waiting=20, num_blocks=100, max_num_seqs=8)
    scaler = Autoscaler(SETTINGS)
    blind = watch(scaler, DECODE, PoolLoad(2, (busy,)), 0.0, 60.0)
    assert {decision.desired for decision in blind} == {2}
    assert "waiting for 1 to get ready" in blind[-1].reason
    assert watch(scaler, DECODE, PoolLoad(2, (busy, busy)), 61.0, 0.0)[-1].desired > 2


# ---- need -------------------------------------------------------------------------------------------


def test_prefill_follows_the_tokens_that_wait_against_speed_and_ttft() -> None:
    """7000 tokens at 1000 tokens/s within 2 s take 3.5 workers, and one is busy with what it has."""
    busy = WorkerLoad(num_running=1, num_waiting=13, num_waiting_tokens=7000, tokens_per_s=1000.0)
    decision = last(PREFILL, PoolLoad(1, (busy,)))
    assert (decision.need, decision.desired) == (4.75, 5)
    assert "7000 uncached tokens wait at 1000 tokens/s a worker for a TTFT of 2 s, 1 of 1 busy" in decision.reason


def test_a_tighter_ttft_takes_more_prefill_workers() -> None:
    busy = WorkerLoad(num_running=1, num_waiting_tokens=3000, tokens_per_s=1000.0)
    sizes = [
        last(PREFILL, PoolLoad(1, (busy,)), AutoscaleSettings(prefill_max=99, target_ttft_s=ttft_s)).desired
        for ttft_s in (4.0, 2.0, 0.5)
    ]
    assert sizes == [2, 3, 8]


def test_without_a_measured_speed_only_busy_workers_count() -> None:
    assert last(PREFILL, PoolLoad(1, (WorkerLoad(num_running=1, num_waiting_tokens=9999),))).need == 1.25


@pytest.mark.parametrize(
    ("load", "desired", "cause"),
    [
        (PoolLoad(1, (WorkerLoad(num_running=8, num_blocks=100, max_num_seqs=8),), num_queued=13), 3, "21 sequences"),
        (PoolLoad(1, (WorkerLoad(1, num_blocks_used=90, num_blocks=100, max_num_seqs=8),)), 2, "90 KV blocks in use"),
        (PoolLoad(1, (WorkerLoad(4, num_blocks=100, max_num_seqs=8, step_s=0.15),)), 2, "a token takes 150 ms"),
        (PoolLoad(1, (WorkerLoad(4, num_blocks=100, max_num_seqs=8, step_s=0.9),)), 2, "a token takes 900 ms"),
        (PoolLoad(1, (WorkerLoad(1, num_blocks=100, max_num_seqs=8, step_s=0.9),)), 1, "1 sequences"),
        (PoolLoad(1, (IDLE,)), 1, "idle"),
    ],
    ids=["sequences", "blocks", "step", "slow step: one at a time", "a batch of one does not shrink", "idle"],
)
def test_decode_follows_the_scarcest_of_blocks_sequences_and_step_time(
    load: PoolLoad, desired: int, cause: str
) -> None:
    decision = last(DECODE, load)
    assert decision.desired == desired
    assert cause in decision.reason


# ---- windows, limits, cooldowns ---------------------------------------------------------------------

FULL = WorkerLoad(num_running=8, num_blocks=100, max_num_seqs=8)


def test_growing_waits_for_the_window_and_then_for_the_cooldown() -> None:
    scaler = Autoscaler(SETTINGS)
    early = watch(scaler, DECODE, PoolLoad(1, (FULL,), 4), 0.0, SETTINGS.up_window_s - 1)
    assert not any(decision.is_change for decision in early)
    assert scaler.decide(DECODE, PoolLoad(1, (FULL,), 4), 5.0).desired == 2
    resting = scaler.decide(DECODE, PoolLoad(2, (FULL, FULL), 30), 6.0)
    assert not resting.is_change
    assert resting.reason.startswith("more if it lasts for 5 s: 46 sequences")
    later = watch(scaler, DECODE, PoolLoad(2, (FULL, FULL), 30), 7.0, 58)
    assert [decision.desired for decision in later if decision.is_change] == [6]
    assert "growing in 50 s" in later[8].reason


def test_a_growing_backlog_is_answered_by_the_middle_of_the_window_and_a_spike_in_it_by_nothing_more() -> None:
    """1. 1000 tokens more each second, at 1000 tokens/s for a TTFT of 2 s: 1.5 to 4 workers are needed, 3 in the
    middle. 2. The same with one look of 90,000 tokens. 3. The least of the window decides whether at all."""
    for spike in (None, 4.0):
        scaler = Autoscaler(SETTINGS)
        for second in (0.0, 1.0, 2.0, 3.0, 4.0, 5.0):
            num_tokens = 90_000 if second == spike else 500 + 1000 * int(second)
            busy = WorkerLoad(num_running=1, num_waiting_tokens=num_tokens, tokens_per_s=1000.0)
            decision = scaler.decide(PREFILL, PoolLoad(1, (busy,)), second)
        assert decision.desired == 3
    quiet = Autoscaler(SETTINGS)
    for second in range(6):
        busy = WorkerLoad(num_running=int(second > 0), num_waiting_tokens=5000 * (second > 0), tokens_per_s=1000.0)
        assert not quiet.decide(PREFILL, PoolLoad(1, (busy,)), float(second)).is_change


def test_nothing_is_added_while_workers_that_were_asked_for_are_not_ready() -> None:
    decision = last(DECODE, PoolLoad(2, (FULL,), 40))
    assert (decision.desired, decision.is_change) == (2, False)
    assert decision.reason.startswith("waiting for 1 to get ready")


def test_shrinking_waits_for_the_stable_window_and_goes_no_lower_than_the_need_and_a_quarter() -> None:
    scaler = Autoscaler(SETTINGS)
    workers = tuple(WorkerLoad(num, num_blocks=100, max_num_seqs=8) for num in (3, 3, 3, 3, 2))
    load = PoolLoad(5, workers)  # 1.94 workers are needed, 2.43 with a quarter more
    decisions = watch(scaler, DECODE, load, 0.0, SETTINGS.stable_window_s)
    assert [decision.desired for decision in decisions if decision.is_change] == [3]
    assert decisions[-1].is_change


def test_one_busy_moment_keeps_the_pool_for_another_stable_window() -> None:
    scaler, quiet = Autoscaler(SETTINGS), PoolLoad(3, (IDLE,) * 3)
    watch(scaler, DECODE, quiet, 0.0, 200)
    scaler.decide(DECODE, PoolLoad(3, (FULL, FULL, IDLE)), 201.0)
    assert not any(decision.is_change for decision in watch(scaler, DECODE, quiet, 202.0, 299))
    assert scaler.decide(DECODE, quiet, 502.0).desired == 1


def test_a_gap_in_the_looks_starts_the_windows_anew() -> None:
    """What happened meanwhile is not known: a router that was away is no reason to shrink."""
    scaler, quiet = Autoscaler(SETTINGS), PoolLoad(3, (IDLE,) * 3)
    watch(scaler, DECODE, quiet, 0.0, 250)
    assert not scaler.decide(DECODE, quiet, 400.0).is_change


def test_sizes_outside_the_limits_are_corrected_at_once() -> None:
    settings = AutoscaleSettings(decode_min=2, decode_max=3)
    assert Autoscaler(settings).decide(DECODE, PoolLoad(1, (IDLE,)), 0.0).desired == 2
    assert Autoscaler(settings).decide(DECODE, PoolLoad(7, (IDLE,) * 7), 0.0).desired == 3


def test_at_its_limit_a_pool_says_that_more_are_needed() -> None:
    decision = last(DECODE, PoolLoad(6, (FULL,) * 6, 40))
    assert not decision.is_change
    assert decision.reason.startswith("at the limit of 6 although more are needed")


def test_a_minimum_above_the_maximum_or_of_nothing_is_refused() -> None:
    with pytest.raises(ValidationError, match="min is larger than its max"):
        AutoscaleSettings(prefill_min=5, prefill_max=4)
    with pytest.raises(ValidationError):
        AutoscaleSettings(decode_min=0)


def test_the_status_has_the_reason_of_now_and_of_the_last_changes() -> None:
    scaler = Autoscaler(AutoscaleSettings(decode_max=1000, up_cooldown_s=0))
    for step in range(15):
        watch(scaler, DECODE, PoolLoad(1 + step, (FULL,) * (1 + step), 1), step * 100.0, 6)
    status = scaler.status(1500.0)["decode"]
    changes = status["changes"]
    assert isinstance(changes, list)
    assert "sequences" in str(status["reason"])
    assert len(changes) == NUM_REMEMBERED
    assert changes[0]["from"] == 15
    assert changes[0]["age_s"] < changes[1]["age_s"]


# ---- simulations ------------------------------------------------------------------------------------


def most_changes_in_a_minute(model: ClusterModel, role: Role) -> int:
    times_s = [at_s for at_s, changed, _, _ in model.changes if changed is role]
    return max((sum(start_s <= at_s < start_s + 60 for at_s in times_s) for start_s in times_s), default=0)


def test_a_step_from_idle_to_overload_and_back() -> None:
    """1. idle: 1+1; 2. 6 requests/s are 3 prefill workers' and 6 decode workers' work; 3. idle again: back to 1+1."""
    model = ClusterModel(AutoscaleSettings(prefill_max=8, decode_max=10, stable_window_s=60))
    model.run(120, 0.0)
    assert model.changes == []
    model.run(400, 6.0)
    assert model.pools[PREFILL].size >= 4
    assert model.pools[DECODE].size >= 7
    assert max(ttft_s for at_s, ttft_s in model.ttft_s if 300 < at_s <= 520) <= SETTINGS.target_ttft_s
    grown = [change for change in model.changes if change[3] > change[2]]
    model.run(400, 0.0)
    assert (model.pools[PREFILL].size, model.pools[DECODE].size) == (1, 1)
    assert [change for change in model.changes if change[3] > change[2]] == grown
    assert max(most_changes_in_a_minute(model, role) for role in Role) <= 2


@pytest.mark.parametrize("start_s", [1.0, 10.0, 45.0])
@pytest.mark.parametrize("period_s", [10.0, 20.0, 35.0])
def test_a_square_wave_causes_at_most_two_changes_a_minute(period_s: float, start_s: float) -> None:
    model = ClusterModel(AutoscaleSettings(prefill_max=8, decode_max=10), start_s=start_s)
    for _ in range(int(600 / (2 * period_s))):
        model.run(period_s, 8.0)
        model.run(period_s, 0.0)
    assert model.changes, "the wave is meant to be more than one worker can carry"
    assert max(most_changes_in_a_minute(model, role) for role in Role) <= 2


@pytest.mark.parametrize("requests_per_s", [5.0, 50.0])
def test_a_spike_of_one_second_grows_a_pool_at_most_once(requests_per_s: float) -> None:
    model = ClusterModel(AutoscaleSettings(prefill_max=99, decode_max=99))
    model.run(60, 0.5)
    model.run(1, requests_per_s)
    model.run(60, 0.5)
    for role in Role:
        assert sum(changed is role for _, changed, _, _ in model.changes) <= 1


@pytest.mark.parametrize("seed", range(12))
def test_under_any_load_sizes_keep_to_the_limits_and_work_in_flight_keeps_its_workers(seed: int) -> None:
    rng = random.Random(seed)
    settings = AutoscaleSettings(
        prefill_min=rng.randint(1, 2),
        prefill_max=rng.randint(2, 8),
        decode_min=rng.randint(1, 2),
        decode_max=rng.randint(2, 8),
        stable_window_s=rng.choice([20, 60, 300]),
    )
    model = ClusterModel(settings, start_s=rng.uniform(1, 60))
    for _ in range(20):
        model.run(rng.uniform(1, 60), rng.choice([0.0, rng.uniform(0, 10)]))
    first_corrections = 4
    for decision in model.decisions[first_corrections:]:
        low, high = (
            (settings.prefill_min, settings.prefill_max)
            if decision.role is PREFILL
            else (settings.decode_min, settings.decode_max)
        )
        assert low <= decision.desired <= high
        assert decision.reason
        if decision.desired < decision.size:
            assert decision.need <= decision.desired
    for role in Role:
        assert most_changes_in_a_minute(model, role) <= 3
