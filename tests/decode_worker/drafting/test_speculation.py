"""How many drafts a step takes: as many as make it faster by what was measured, and none with prompts."""

from dataclasses import replace

import pytest

from common.engine.contract.executor import StepFinished
from common.engine.contract.plan import SequenceResult, StepPlan, StepResult
from common.engine.scheduling.row_times import RowTimes
from common.values.request import SampledToken, SamplingParams
from decode_worker.drafting.speculation import best_num_drafts
from tests.core_bench import tokens
from tests.decode_worker.harness import Bench, job

SENTENCE = (11, 12, 13, 14, 15, 16, 17)


def times(measured: dict[int, float]) -> RowTimes:
    rows = RowTimes()
    for num_rows, time_s in measured.items():
        rows.add(num_rows, time_s)
    return rows


def test_rows_that_cost_nothing_are_all_taken() -> None:
    assert best_num_drafts(times({1: 1.0, 9: 1.0}), 1, [0.5] * 8) == 8


def test_rows_that_cost_their_share_are_not_taken_even_if_surely_right() -> None:
    assert best_num_drafts(times({8: 8.0, 16: 16.0}), 8, [1.0] * 8) == 0


def test_drafts_are_taken_up_to_where_they_pay() -> None:
    """Rows cost nothing up to 4, and then as much as a step: three right ones double the speed, the fourth slows it."""
    assert best_num_drafts(times({1: 1.0, 4: 1.0, 5: 3.0, 9: 7.0}), 1, [0.9] * 8) == 3


def test_what_gains_less_than_times_are_exact_is_not_taken() -> None:
    assert best_num_drafts(times({8: 1.0, 16: 1.0}), 8, [0.1]) == 0


def test_nothing_is_taken_before_a_step_was_measured() -> None:
    assert best_num_drafts(RowTimes(), 1, [1.0] * 4) == 0


def repeating(plan: StepPlan, seconds_per_row: float, base_s: float = 1.0) -> StepResult:
    """A model that says its sentence for ever, whatever the prompt; a step takes `base_s` and so much for each row."""
    results = []
    for sequence in plan.sequences:
        run = []
        for position, spec in enumerate(sequence.samples):
            run.append(SENTENCE[spec.position % len(SENTENCE)])
            if position < len(sequence.draft_token_ids) and run[-1] != sequence.draft_token_ids[position]:
                break
        if sequence.samples:
            results.append(SequenceResult(sequence.sequence_id, (tuple(map(SampledToken, run)),)))
    return StepResult(plan.step_id, tuple(results), base_s + seconds_per_row * plan.num_tokens)


def run_all(bench: Bench, seconds_per_row: float, base_s: float = 1.0) -> list[int]:
    """Rows of each step."""
    rows = []
    while bench.plan is not None:
        plan, bench.plan = bench.plan, None
        rows.append(plan.num_tokens)
        bench.handle(StepFinished(repeating(plan, seconds_per_row, base_s)))
    return rows


def started(num: int, *, max_draft_tokens: int = 8, max_tokens: int = 100, **sampling: object) -> Bench:
    bench = Bench(num_blocks=600, budget=512, max_num_seqs=64, max_num_waiting=64, max_draft_tokens=max_draft_tokens)
    for number in range(num):
        params = replace(SamplingParams(seed=1, max_tokens=max_tokens), **sampling)  # type: ignore[arg-type]
        bench.reserve(job(f"r{number}", tokens(9, first=100 * number), sampling=params), local=1000)
    return bench


def test_a_text_that_repeats_takes_few_steps_where_rows_are_cheap() -> None:
    bench = started(1)
    rows = run_all(bench, seconds_per_row=0.01)
    assert bench.output("r0") == [SENTENCE[at % 7] for at in range(100)]
    assert len(rows) < 30
    assert max(rows) == 9


def test_a_batch_that_is_bound_by_computing_takes_no_drafts() -> None:
    """But for a probe now and then, in which rows are measured."""
    bench = started(16)
    rows = run_all(bench, seconds_per_row=1.0, base_s=0.0)
    assert sum(rows[2:]) < 1.01 * 16 * 99
    assert len(rows) > 95


def test_the_same_batch_speculates_where_rows_are_cheap() -> None:
    assert len(run_all(started(16), seconds_per_row=0.001)) < 40


def test_nothing_is_drafted_nor_kept_to_draft_from_where_speculation_is_off() -> None:
    bench = started(1, max_draft_tokens=0)
    assert bench.role.policy.speculation is None
    assert run_all(bench, seconds_per_row=0.01)[1:] == [1] * 99


def test_there_are_no_drafts_beside_a_prompt() -> None:
    bench = started(1)
    for _ in range(12):
        plan, bench.plan = bench.plan, None
        assert plan is not None
        bench.handle(StepFinished(repeating(plan, 0.01)))
    bench.reserve(job("late", tokens(300, first=900), max_tokens=5), local=1000)
    plan, bench.plan = bench.plan, None
    assert plan is not None
    assert plan.sequences[0].draft_token_ids
    bench.handle(StepFinished(repeating(plan, 0.01)))
    assert bench.plan is not None
    assert [len(sequence.draft_token_ids) for sequence in bench.plan.sequences] == [0, 0]


@pytest.mark.parametrize(("max_tokens", "stops"), [(40, ()), (100, (16,)), (30, (99,))])
def test_no_draft_reaches_beyond_the_end_of_a_choice(max_tokens: int, stops: tuple[int, ...]) -> None:
    bench = started(1, max_tokens=max_tokens, stop_token_ids=stops, min_tokens=0)
    num_done = 0
    while bench.plan is not None:
        plan, bench.plan = bench.plan, None
        (sequence,) = plan.sequences
        assert not set(sequence.draft_token_ids) & set(stops)
        if sequence.draft_token_ids:
            num_done = len(bench.output("r0"))
            assert num_done + len(sequence.draft_token_ids) < max_tokens
        bench.handle(StepFinished(repeating(plan, 0.01)))
    assert len(bench.output("r0")) == (6 if 16 in stops else max_tokens)


def test_a_new_request_drafts_from_the_answers_before_it_of_its_tenant_alone() -> None:
    """The sentence is longer than the answer, so that an answer does not repeat itself."""
    num_steps = {}
    for first, second in (("alice", "alice"), ("alice", "bob")):
        bench = Bench(num_blocks=600, budget=512, max_draft_tokens=8)
        for name, tenant in (("a", first), ("b", second)):
            work = job(name, tokens(9, first=500), max_tokens=7, tenant=tenant)
            bench.reserve(work, local=1000)
            rows = run_all(bench, seconds_per_row=0.001)
        num_steps[second] = len(rows)
    assert num_steps["bob"] == 7
    assert num_steps["alice"] < 6
