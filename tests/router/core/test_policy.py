"""The formulas, the choice among costs, and that no prefix pulls everything to one worker."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.values.messages import FirstTokens, Granted, Prefill, Reserve, Role
from common.values.request import FinishReason
from router.core import policy
from router.core.policy import Candidate
from tests.router.core.kit import Driver, request, token


def candidates(**costs: float) -> list[Candidate]:
    return [Candidate(worker_id, cost=cost) for worker_id, cost in costs.items()]


def test_prefill_costs_the_time_until_the_prompt_is_computed() -> None:
    assert policy.prefill_cost_s(1500, 500, 1000.0) == 2.0
    assert policy.prefill_cost_s(0, 500, 0.0) == policy.prefill_cost_s(0, 500, policy.DEFAULT_TOKENS_PER_S)


def test_decode_costs_what_is_taken_and_what_is_missing() -> None:
    load = policy.decode_load(32, 64, 2, 8)
    assert load == 0.75
    assert policy.decode_cost(load, 100, 100) == 1.25
    assert policy.decode_cost(load, 0, 100) == 0.75


def test_cheapest_wins_and_who_cannot_take_it_is_passed_over() -> None:
    few = candidates(a=3.0, b=1.0, c=2.0)
    assert policy.choose(Role.PREFILL, few)[0] == 1
    few[1] = replace(few[1], refusal="is draining")
    assert policy.choose(Role.PREFILL, few)[0] == 2
    assert policy.choose(Role.PREFILL, [replace(c, refusal="full") for c in few])[0] is None
    assert policy.choose(Role.PREFILL, [])[0] is None


def test_equal_costs_go_to_the_one_chosen_longest_ago() -> None:
    few = candidates(a=1.0, b=1.02, c=1.5)
    few[0] = replace(few[0], last_chosen=7)
    few[1] = replace(few[1], last_chosen=3)
    chosen, why = policy.choose(Role.PREFILL, few)
    assert (chosen, why) == (1, "least recently chosen among equals")


def test_worker_over_its_share_yields_unless_the_others_are_busy() -> None:
    hot = replace(candidates(a=0.01)[0], recent_placements=20.0)
    cold = replace(candidates(b=0.5)[0], recent_placements=2.0, load=0.2)
    assert policy.choose(Role.PREFILL, [hot, cold])[0] == 1
    assert policy.choose(Role.PREFILL, [hot, replace(cold, load=5.0)])[0] == 0
    assert policy.choose(Role.PREFILL, [hot])[0] == 0
    slow = replace(hot, recent_placements=5.0)  # a single conversation, far from a hot spot
    assert policy.choose(Role.PREFILL, [slow, replace(cold, recent_placements=0.0)])[0] == 0


def test_recent_placements_halve_with_time() -> None:
    assert policy.decayed(8.0, policy.RECENT_HALF_LIFE_S) == pytest.approx(4.0)


def serve(driver: Driver, request_id: str, num_tokens: int, cached: dict[str, int]) -> str:
    """Run a prompt with so many cached blocks per worker through prefill; returns the prefill worker."""
    driver.cached_blocks = cached
    driver.submit(request(request_id, num_tokens=num_tokens, max_tokens=1))
    driver.grant("d0")
    for worker_id in ("p0", "p1"):
        for message in driver.take(worker_id):
            if isinstance(message, Prefill):
                attempt_id = message.work.attempt_id
                answer = (token(0, finish=FinishReason.LENGTH),)
                driver.say(worker_id, FirstTokens(attempt_id, 0, answer, 0.0, 0.0, 0))
                driver.take()
                return worker_id
    raise AssertionError("no prefill was sent")


def test_shared_prefix_does_not_pull_all_requests_to_its_first_owner() -> None:
    """E-08: 200 requests at 20 per second, one shared prefix, two prefill workers, never a queue."""
    driver = Driver("p0", "p1", "d0")
    owners: dict[str, int] = {}
    counts = {"p0": 0, "p1": 0}
    for idx in range(200):
        owner = serve(driver, f"r{idx}", 80, dict(owners))
        owners[owner] = 4
        counts[owner] += 1
        driver.advance(0.05)
    assert max(counts.values()) <= 160, counts
    assert min(counts.values()) >= 40


def test_conversation_stays_where_its_prefix_is() -> None:
    driver = Driver("p0", "p1", "d0")
    for idx in range(10):
        assert serve(driver, f"r{idx}", 800, {"p1": 40}) == "p1"
        driver.advance(5.0)


def test_queue_on_the_prefix_owner_outweighs_its_cache() -> None:
    driver = Driver("p0", "p1", "d0")
    driver.stats("p1", num_waiting_uncached_tokens=5000, prefill_tokens_per_s=1000.0)
    driver.stats("p0", prefill_tokens_per_s=1000.0)
    assert serve(driver, "r", 800, {"p1": 40}) == "p0"


def test_slow_prefill_worker_gets_little() -> None:
    driver = Driver("p0", "p1", "d0")
    driver.stats("p0", prefill_tokens_per_s=100.0)
    driver.stats("p1", prefill_tokens_per_s=1000.0)
    chosen = [serve(driver, f"r{idx}", 400, {}) for idx in range(30)]
    assert chosen.count("p0") <= 12


def test_own_placements_count_before_the_worker_reports_them() -> None:
    """A burst between two reports spreads."""
    driver = Driver("p0", "p1", "d0")
    driver.submit(request("a", num_tokens=200))
    driver.submit(request("b", num_tokens=200))
    driver.submit(request("c", num_tokens=200))
    driver.submit(request("d", num_tokens=200))
    for message in driver.take("d0"):
        assert isinstance(message, Reserve)
        driver.say("d0", Granted(message.work.attempt_id, 0, is_local=False))
    assert [len(driver.take("p0")), len(driver.take("p1"))] == [2, 2]


def test_decode_prefers_the_cached_prefix_between_equal_loads_and_the_free_worker_otherwise() -> None:
    driver = Driver("p0", "d0", "d1")
    driver.cached_blocks = {"d1": 4}
    driver.submit(request("a", num_tokens=80))
    assert len(driver.take("d1")) == 1
    driver.stats("d1", kv_blocks_used=60, kv_blocks_free=4, num_running=7)
    driver.submit(request("b", num_tokens=80))
    assert len(driver.take("d0")) == 1


def test_decode_worker_prefills_when_that_is_clearly_sooner_or_nobody_else_can() -> None:
    there = candidates(p0=0.9, p1=0.6)
    assert policy.choose_prefiller(there, Candidate("d0", cost=0.1)) == (2, "sooner than a prefill worker")
    assert policy.choose_prefiller(there, Candidate("d0", cost=0.3))[0] == 1
    there[1] = replace(there[1], refusal="has refused lately")
    assert policy.choose_prefiller(there, Candidate("d0", cost=0.3))[0] == 2
    assert policy.choose_prefiller([replace(c, refusal="full") for c in there], Candidate("d0", cost=99.0))[0] == 2


def test_prefill_workers_keep_a_prompt_while_one_that_could_take_it_is_not_known() -> None:
    there, here = candidates(p0=0.9, p1=0.6), Candidate("d0", cost=0.1)
    silent = replace(there[0], unknown="is silent")
    assert policy.choose_prefiller([silent, there[1]], here) == (1, "blind: p0 is silent")
    assert policy.choose_prefiller(there, replace(here, unknown="is new")) == (1, "blind: d0 is new")
    assert policy.choose_prefiller([replace(silent, refusal="is draining"), there[1]], here)[0] == 2


@settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    there=st.lists(st.floats(0.0, 1e3), min_size=1, max_size=5), here=st.floats(0.0, 1e3), shorter=st.floats(0.0, 1.0)
)
def test_a_prompt_never_waits_longer_for_being_balanced(there: list[float], here: float, shorter: float) -> None:
    """The chosen worker needs no longer than the best prefill worker; less work here never sends a prompt away."""
    few = [Candidate(f"p{idx}", cost=cost) for idx, cost in enumerate(there)]
    chosen, _ = policy.choose_prefiller(few, Candidate("d0", cost=here))
    assert (*there, here)[chosen] <= min(there)
    if chosen == len(there):
        assert policy.choose_prefiller(few, Candidate("d0", cost=here * shorter))[0] == len(there)
