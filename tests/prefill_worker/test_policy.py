"""Order, budget and blocks: what goes into the next step."""

import pytest

from common.values.messages import FirstTokens
from kvtransfer.events import AcknowledgedByPeer
from prefill_worker.policy import MAX_OVERTAKEN, MAX_SHORT_STEPS
from tests.core_bench import tokens
from tests.prefill_worker.harness import Bench, prompt


def test_step_never_exceeds_its_budget_or_its_sequences() -> None:
    bench = Bench(budget=64, max_num_seqs=3, max_num_waiting=20)
    for i in range(10):
        bench.prefill(prompt(f"r{i}", tokens(10 + 7 * i, first=1000 * i)))
    while bench.plan is not None:
        assert 0 < bench.plan.num_tokens <= 64
        assert len(bench.plan.sequences) <= 3
        bench.step()
    assert len(bench.sent) == 10


def test_short_prompts_share_a_step_in_arrival_order() -> None:
    bench = Bench(budget=64)
    bench.prefill(prompt("busy", tokens(64)))
    for i in range(4):
        bench.prefill(prompt(f"r{i}", tokens(30, first=1000 * (i + 1))))
    bench.step()
    assert bench.scheduled() == {2: 30, 3: 30, 4: 4}
    bench.step()
    assert bench.scheduled() == {4: 26, 5: 30}


def test_long_prompt_delays_a_short_one_by_one_chunk() -> None:
    bench = Bench(num_blocks=256, budget=64)
    bench.prefill(prompt("long", tokens(2000)))
    bench.step()
    bench.prefill(prompt("short", tokens(50, first=5000)))
    bench.step()  # the chunk that was running
    assert bench.scheduled() == {1: 14, 2: 50}
    bench.step()
    assert isinstance(bench.messages("short")[0], FirstTokens)


def test_several_long_prompts_delay_a_short_one_by_one_chunk_too() -> None:
    bench = Bench(num_blocks=512, budget=64)
    for i in range(4):
        bench.prefill(prompt(f"long{i}", tokens(1000, first=10_000 * i)))
    for _ in range(12):
        bench.step()
    bench.prefill(prompt("short", tokens(64, first=90_000)))
    bench.step()
    bench.step()
    assert bench.messages("short")


@pytest.mark.parametrize("short_length", [64, 61])
def test_short_prompts_do_not_starve_a_long_one(short_length: int) -> None:
    """Whether they fill each step, or leave the long one a few tokens of it."""
    bench = Bench(num_blocks=256, budget=64, max_num_seqs=4)
    bench.prefill(prompt("long", tokens(640)))
    num_steps = 0
    while not bench.messages("long"):
        bench.prefill(prompt(f"s{num_steps}", tokens(short_length, first=1000 * (num_steps + 1))))
        bench.step()
        for transfer_id in bench.computed():
            bench.handle(AcknowledgedByPeer(transfer_id))
        num_steps += 1
        assert num_steps < (MAX_SHORT_STEPS + 2) * 10
    assert num_steps > 10


def test_higher_priority_overtakes_and_lower_number_is_higher() -> None:
    bench = Bench(budget=64)
    bench.prefill(prompt("busy", tokens(64)))
    bench.prefill(prompt("normal", tokens(64, first=1000)))
    bench.prefill(prompt("urgent", tokens(200, first=2000), priority=-1))
    bench.step()
    assert bench.scheduled() == {3: 64}
    bench.run_all()
    assert [message.attempt_id.request_id for message in bench.sent] == ["busy", "urgent", "normal"]


def test_admission_counts_blocks_not_tokens() -> None:
    """One free block, two prompts of two tokens: one runs, one waits; both finish."""
    bench = Bench(num_blocks=1)
    bench.prefill(prompt("a", tokens(2)))
    bench.prefill(prompt("b", tokens(2, first=50)))
    assert bench.scheduled() == {1: 2}
    bench.step()
    assert bench.plan is None
    bench.acknowledge("a")
    assert bench.scheduled() == {2: 2}
    bench.step()
    bench.acknowledge("b")
    assert bench.counts() == (0, 0)


def test_smaller_prompt_may_use_the_blocks_that_a_larger_one_cannot() -> None:
    """Three free blocks, 17 + 17 + 1 tokens: the first and the last run, the second waits."""
    bench = Bench(num_blocks=3)
    bench.prefill(prompt("busy", tokens(1, first=7000)))
    for name, length, first in (("a", 17, 0), ("b", 17, 100), ("c", 1, 200)):
        bench.prefill(prompt(name, tokens(length, first=first)))
    bench.step()
    assert bench.scheduled() == {2: 17}
    bench.acknowledge("busy")
    bench.step()
    assert bench.scheduled() == {4: 1}
    bench.acknowledge("a")
    bench.run_all()
    bench.acknowledge("c")
    bench.run_all()
    assert bench.messages("b")


def test_overtaking_a_prompt_without_blocks_is_bounded() -> None:
    bench = Bench(num_blocks=4, budget=16, max_num_seqs=1, max_num_waiting=8)
    bench.prefill(prompt("first", tokens(16, first=7000)))
    bench.prefill(prompt("large", tokens(64)))
    num_overtakers = 0
    for i in range(MAX_OVERTAKEN + 20):  # one small prompt always holds blocks
        bench.prefill(prompt(f"s{i}", tokens(16, first=1000 * (i + 1))))
        if bench.plan is None:
            break
        bench.step()
        num_overtakers = i + 1
        bench.acknowledge(f"s{i - 2}" if i >= 2 else "first")
    assert num_overtakers <= MAX_OVERTAKEN + MAX_SHORT_STEPS + 2
    for i in range(num_overtakers + 1):
        bench.acknowledge(f"s{i}")
    bench.run_all()
    assert bench.messages("large")


@pytest.mark.parametrize("num_stalled", [1, 2])
def test_stalled_transfers_do_not_stop_what_still_fits(num_stalled: int) -> None:
    """Computed prompts wait for a peer that does not move; others go on in the blocks that are left."""
    bench = Bench(num_blocks=8)
    for i in range(num_stalled):
        bench.prefill(prompt(f"stalled{i}", tokens(48, first=1000 * i)))
    bench.run_all()
    bench.prefill(prompt("too large now", tokens(128, first=5000)))
    bench.prefill(prompt("small", tokens(32, first=6000)))
    bench.run_all()
    assert bench.messages("small")
    for name in [f"stalled{i}" for i in range(num_stalled)] + ["small"]:
        bench.acknowledge(name)
    bench.run_all()
    assert bench.messages("too large now")


def test_prompt_whose_prefix_is_cached_counts_as_short() -> None:
    bench = Bench(num_blocks=128, budget=64)
    bench.prefill(prompt("warm", tokens(320)))
    bench.run_all()
    bench.prefill(prompt("long", tokens(400, first=5000)))
    bench.prefill(prompt("hit", tokens(320) + tokens(20, first=9000)))
    bench.step()
    assert bench.scheduled() == {2: 44, 3: 20}


def test_waiting_prompts_do_not_count_as_computed() -> None:
    bench = Bench(budget=16, max_num_seqs=1)
    bench.prefill(prompt("a", tokens(64)))
    bench.prefill(prompt("b", tokens(64)))
    assert bench.core.stats(bench.now_s).num_waiting_uncached_tokens == 48 + 64


@pytest.mark.parametrize("length", [20, 1000])
def test_a_tenants_flood_delays_anothers_prompt_by_the_step_that_is_running(length: int) -> None:
    bench = Bench(num_blocks=1024, budget=64, max_num_waiting=40)
    for i in range(10):
        bench.prefill(prompt(f"flood{i}", tokens(length, first=10_000 * i), tenant="a", priority=-1))
    bench.step()
    bench.prefill(prompt("other", tokens(50, first=500_000), tenant="b"))
    bench.step()
    bench.step()
    assert isinstance(bench.messages("other")[0], FirstTokens)


def test_tenants_share_steps_by_tokens_and_one_alone_gets_all() -> None:
    bench = Bench(num_blocks=1024, budget=64, max_num_seqs=8, max_num_waiting=80)
    bench.prefill(prompt("busy", tokens(64)))
    for i in range(20):
        bench.prefill(prompt(f"short{i}", tokens(16, first=10_000 * (i + 1)), tenant="a"))
    for i in range(2):
        bench.prefill(prompt(f"long{i}", tokens(200, first=1_000_000 * (i + 1)), tenant="b"))
    num_tokens = dict.fromkeys("ab", 0)
    bench.step()
    while sum(num_tokens.values()) < 512:
        for sequence_id, num in bench.scheduled().items():
            num_tokens["a" if sequence_id <= 21 else "b"] += num
        bench.step()
    assert abs(num_tokens["a"] - num_tokens["b"]) <= 64
    assert sum(bench.scheduled().values()) == 64
