"""Prompt tokens beside running streams: gaps within the budget on any engine, and always some progress."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.engine.scheduling.step_rate import StepRate
from decode_worker.policy import FIRST_CHUNK, MIN_CHUNK, ChunkBudget
from tests.core_bench import tokens
from tests.decode_worker.harness import Bench, job

MAX_TOKENS = 512
# The machine may be busy; examples are the same in every run.
STEADY = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


def run_steps(
    budget: ChunkBudget, rate: StepRate, num_steps: int, num_decoding: int, decode_s: float, token_s: float
) -> float:
    """Prefills as much as it may; the duration of the last step, on an engine whose steps take what they hold."""
    duration_s = 0.0
    for _ in range(num_steps):
        num_tokens = budget.chunk_tokens(rate, num_decoding)
        duration_s = (decode_s if num_decoding else 0.0) + num_tokens * token_s
        rate.add(num_tokens, num_decoding, duration_s)
    return duration_s


@STEADY
@given(
    budget_s=st.floats(0.02, 0.2),
    decode_s=st.floats(0.001, 0.3),
    token_s=st.floats(1e-6, 2e-3),
    grown=st.floats(0.5, 3.0),
)
def test_steps_end_within_the_budget_or_take_the_least_there_is(
    budget_s: float, decode_s: float, token_s: float, grown: float
) -> None:
    """Even when every stream's step has become slower since a step without prompt tokens was last measured."""
    budget, rate = ChunkBudget(budget_s, MAX_TOKENS), StepRate()
    rate.add(0, 4, decode_s)
    now_s = decode_s * grown
    duration_s = run_steps(budget, rate, 60, 4, now_s, token_s)
    num_tokens = budget.chunk_tokens(rate, 4)
    assert MIN_CHUNK <= num_tokens <= MAX_TOKENS
    assert duration_s <= max(1.1 * budget_s, now_s + 1.1 * MIN_CHUNK * token_s)


@STEADY
@given(decode_s=st.floats(0.001, 0.04), token_s=st.floats(1e-5, 1e-3))
def test_budget_is_used(decode_s: float, token_s: float) -> None:
    budget, rate = ChunkBudget(0.05, MAX_TOKENS), StepRate()
    rate.add(0, 4, decode_s)
    duration_s = run_steps(budget, rate, 60, 4, decode_s, token_s)
    is_largest = budget.chunk_tokens(rate, 4) in (MIN_CHUNK, MAX_TOKENS)
    assert is_largest or duration_s >= 0.05 - 2 * token_s


@STEADY
@given(decode_s=st.floats(0.001, 0.04), token_s=st.floats(1e-5, 1e-3), num_decoding=st.sampled_from((0, 4)))
def test_told_speed_is_that_of_the_steps(decode_s: float, token_s: float, num_decoding: int) -> None:
    budget, rate = ChunkBudget(0.05, MAX_TOKENS), StepRate()
    rate.add(0, 4, decode_s)
    duration_s = run_steps(budget, rate, 60, num_decoding, decode_s, token_s)
    assert budget.prefill_tokens_per_s(rate, num_decoding) == pytest.approx(
        budget.chunk_tokens(rate, num_decoding) / duration_s, rel=0.1
    )


def test_first_chunk_is_small_and_nothing_is_told_before_it() -> None:
    budget, rate = ChunkBudget(0.05, MAX_TOKENS), StepRate()
    assert (budget.chunk_tokens(rate, 0), budget.prefill_tokens_per_s(rate, 0)) == (FIRST_CHUNK, 0.0)


def test_without_a_budget_steps_are_as_large_as_fits() -> None:
    budget, rate = ChunkBudget(0.0, MAX_TOKENS), StepRate()
    run_steps(budget, rate, 5, 4, 1.0, 1.0)
    assert budget.chunk_tokens(rate, 4) == MAX_TOKENS


def test_a_prompt_is_computed_in_chunks_while_a_stream_gets_a_token_in_every_step() -> None:
    bench = Bench(num_blocks=256, budget=512, gap_budget_s=0.03)
    bench.start(job("stream", tokens(20), max_tokens=40))
    bench.step(seconds=0.01)
    bench.reserve(job("prompt", tokens(400, first=500), max_tokens=2), local=512)
    sizes = []
    while (scheduled := bench.scheduled()).get(2, 0) != 1 and scheduled:
        assert scheduled[1] == 1
        sizes.append(scheduled.get(2, 0))
        bench.step(seconds=0.01 + 5e-4 * sizes[-1])
    assert sum(sizes) == 400
    assert max(sizes) <= 40, "0.02 s at 2,000 tokens per second"
    assert sizes[-2] >= 36
