"""Drafts in a decode core: outputs stay what they are, in fewer steps, and nothing of a rejected draft stays."""

import random
from collections.abc import Callable
from itertools import cycle

import pytest

from common.engine.contract.executor import StepFailed
from common.engine.kv.block_pool import BlockPool
from common.engine.scheduling.block_tables import PoolGroup
from common.values.messages import AttemptFailed, TokenBatch
from common.values.request import FinishReason, SamplingParams, Work
from common.worker.events import PublishBlocks
from tests.core_bench import attempt, tokens
from tests.decode_worker.harness import Bench, job
from tests.decode_worker.oracle import Oracle
from tests.simkit.fake_engine import VOCAB_SIZE, expected_output


def drafting(bench: Bench, share_right: float = 1.0, max_draft_tokens: int = 3, seed: int = 1) -> Bench:
    """Each step has exactly `max_draft_tokens` drafts, where nothing else limits them."""
    rng = random.Random(seed)
    rng.randint = lambda _, most: most  # type: ignore[method-assign]
    bench.role.policy.speculation = Oracle(rng, share_right, max_draft_tokens)
    return bench


def test_accepted_drafts_and_the_token_behind_them_come_in_one_step() -> None:
    bench, work = drafting(Bench()), job("a", tokens(20), max_tokens=9)
    bench.start(work)
    bench.run_all()
    assert bench.output("a") == expected_output(work, 0)
    assert bench.finish_reason("a") is FinishReason.LENGTH
    assert bench.runner.num_steps == 2  # one token came with the prompt, then twice 3 drafts and one more
    sizes = [len(batch.attempts[0].tokens) for batch in bench.sent if isinstance(batch, TokenBatch)]
    assert sizes == [1, 4, 4]
    assert bench.counts() == (0, 0)


@pytest.mark.parametrize("share_right", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("block_size", [1, 2, 5])
def test_output_is_the_same_however_many_drafts_are_right(share_right: float, block_size: int) -> None:
    for seed in range(5):
        bench = drafting(Bench(num_blocks=64 // block_size + 8, block_size=block_size), share_right, 5, seed)
        work = job("a", tokens(11), max_tokens=20)
        bench.start(work)
        bench.run_all()
        assert bench.output("a") == expected_output(work, 0)
        assert bench.counts() == (0, 0)


def test_a_stop_token_inside_a_run_ends_it() -> None:
    free = expected_output(job("a", tokens(20), max_tokens=12), 0)
    at = next(at for at in range(2, 12) if free.index(free[at]) == at and at % 4 != 0)
    work = job("a", tokens(20), sampling=SamplingParams(seed=1, max_tokens=12, stop_token_ids=(free[at],)))
    bench = drafting(Bench())
    bench.role.policy.speculation = drafts_of(bench, free)
    bench.start(work)
    bench.run_all()
    assert bench.output("a") == free[: at + 1]
    assert bench.finish_reason("a") is FinishReason.STOP
    assert bench.counts() == (0, 0)


def drafts_of(bench: Bench, output: list[int]) -> Oracle:
    """Drafts beyond the stop: as if the model had not known it."""

    class Beyond(Oracle):
        def _drafts(self, sequence: object) -> list[int]:
            num_done = len(sequence.token_ids) - len(sequence.work.token_ids)  # type: ignore[attr-defined]
            return output[num_done : num_done + 3]

    return Beyond(random.Random(1))


@pytest.mark.parametrize("min_tokens", [0, 5, 14])
def test_min_tokens_and_penalties_count_within_a_run(min_tokens: int) -> None:
    stops = tuple(range(0, VOCAB_SIZE, 3))
    sampling = SamplingParams(seed=1, max_tokens=16, min_tokens=min_tokens, stop_token_ids=stops, frequency_penalty=0.5)
    bench, work = drafting(Bench(), share_right=0.9), job("a", tokens(20), sampling=sampling)
    bench.start(work)
    bench.run_all()
    assert bench.output("a") == expected_output(work, 0)
    assert len(bench.output("a")) >= min_tokens


def test_blocks_of_rejected_drafts_are_given_back_with_the_step() -> None:
    """Every other step has wrong drafts: in the steps between, the sequence has the blocks that it has without any."""
    plain, bench = Bench(block_size=2), drafting(Bench(block_size=2), share_right=0.0, max_draft_tokens=9)
    sizes = cycle((9, 0))
    bench.role.policy.speculation._rng.randint = lambda *_: next(sizes)  # type: ignore[union-attr]
    for each in (plain, bench):
        each.start(job("a", tokens(9), max_tokens=20))
    while plain.plan is not None:
        assert bench.plan is not None
        num_more = bench.counts()[0] - plain.counts()[0]
        assert num_more > 0 if bench.plan.sequences[0].draft_token_ids else num_more == 0
        plain.step()
        bench.step()
    assert bench.plan is None
    assert bench.counts() == (0, 0)


@pytest.mark.parametrize("share_right", [0.0, 0.5, 1.0])
def test_only_blocks_of_accepted_tokens_are_found_again(share_right: float) -> None:
    plain, bench = Bench(block_size=2), drafting(Bench(block_size=2), share_right, 6)
    for each in (plain, bench):
        each.start(job("a", tokens(9), max_tokens=16))
        each.run_all()
    assert set(bench.core.blocks.cached_hashes()) == set(plain.core.blocks.cached_hashes())
    published = [effect for effect in bench.effects if isinstance(effect, PublishBlocks)]
    assert {block for effect in published for block in effect.stored} == set(bench.core.blocks.cached_hashes())


def test_drafts_take_no_block_that_another_sequence_needs() -> None:
    """Two sequences in a pool that just holds both: without drafts nothing is preempted, and so with them."""
    for share_right in (0.0, 0.7):
        bench = drafting(Bench(num_blocks=18, block_size=2), share_right, 8)
        works = [job(name, tokens(8, first=first), max_tokens=10) for name, first in (("a", 0), ("b", 300))]
        for work in works:
            bench.start(work)
        bench.run_all()
        assert [bench.output(name) for name in "ab"] == [expected_output(work, 0) for work in works]
        assert bench.core.role.state.scheduler.num_preemptions == 0


def test_sequences_with_drafts_are_preempted_and_go_on() -> None:
    bench = drafting(Bench(num_blocks=10, block_size=2), 0.8, 4)
    works = [job(name, tokens(6, first=first), max_tokens=12) for name, first in (("a", 0), ("b", 300))]
    for work in works:
        bench.start(work)
    bench.run_all()
    assert bench.core.role.state.scheduler.num_preemptions > 0
    assert [bench.output(name) for name in "ab"] == [expected_output(work, 0) for work in works]
    assert bench.counts() == (0, 0)


@pytest.mark.parametrize("length", [15, 16, 17])
def test_choices_with_drafts_do_not_write_into_one_another(length: int) -> None:
    bench, work = drafting(Bench(), 0.7, 5), job("a", tokens(length), max_tokens=20, choices=(0, 1, 2, 3))
    bench.start(work)
    bench.run_all()
    assert [bench.output("a", choice) for choice in range(4)] == [expected_output(work, c) for c in range(4)]
    assert bench.counts() == (0, 0)


@pytest.mark.parametrize("share_right", [0.5, 1.0])
def test_windows_move_on_over_runs(share_right: float) -> None:
    groups = [PoolGroup(BlockPool(60, 2)), PoolGroup(BlockPool(60, 2), window=5)]
    bench, work = drafting(Bench(groups=groups), share_right, 4), job("a", tokens(11), max_tokens=30)
    bench.start(work)
    bench.run_all()
    assert bench.output("a") == expected_output(work, 0)
    assert bench.counts() == (0, 0)


def cancel(bench: Bench) -> None:
    bench.cancel("a")
    bench.step()


def fail(bench: Bench) -> None:
    assert bench.plan is not None
    plan, bench.plan = bench.plan, None
    bench.handle(StepFailed(plan.step_id, "injected"))
    assert any(isinstance(message, AttemptFailed) for message in bench.sent)


def not_finite(bench: Bench) -> None:
    assert bench.plan is not None
    bench.runner.nan_sequences = {sequence.sequence_id for sequence in bench.plan.sequences}
    bench.step()


@pytest.mark.parametrize("end", [cancel, fail, not_finite])
def test_a_sequence_that_ends_under_its_drafts_gives_everything_back(end: Callable[[Bench], None]) -> None:
    bench = drafting(Bench(block_size=2), 0.5, 6)
    bench.start(job("a", tokens(9), max_tokens=30))
    bench.step()
    assert bench.plan is not None
    assert bench.plan.sequences[0].draft_token_ids
    end(bench)
    assert bench.plan is None
    assert bench.counts() == (0, 0)


def test_drafts_keep_within_the_token_budget_of_a_step() -> None:
    bench = drafting(Bench(budget=7, max_num_seqs=4), 1.0, 6)
    works: list[Work] = [job(f"r{i}", tokens(5, first=100 * i), max_tokens=12) for i in range(3)]
    for work in works:
        bench.start(work)
    while bench.plan is not None:
        assert bench.plan.num_tokens <= 7
        bench.step()
    assert [bench.output(f"r{i}") for i in range(3)] == [expected_output(work, 0) for work in works]


def test_the_router_is_told_of_drafts_with_the_tokens_they_came_to() -> None:
    bench = drafting(Bench(), 1.0, 3)
    works = [job(name, tokens(20, first=first), max_tokens=9) for name, first in (("a", 0), ("b", 300))]
    for work in works:
        bench.start(work)
    bench.run_all()
    told = [each for batch in bench.sent if isinstance(batch, TokenBatch) for each in batch.attempts]
    for name in "ab":
        counts = [(len(t.tokens), t.num_drafts, t.num_accepted_drafts) for t in told if t.attempt_id == attempt(name)]
        assert counts == [(1, 0, 0), (4, 3, 3), (4, 3, 3)]
