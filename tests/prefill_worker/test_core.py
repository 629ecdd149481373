"""The prefill core, claim by claim."""

import pytest

from common.engine.contract.executor import StepFinished
from common.values.ids import TransferId
from common.values.request import FinishReason, SamplingParams
from common.worker.events import PublishBlocks, RunStep
from kvtransfer.events import (
    FirstTokensSampled,
    TokensComputed,
    TransferStarted,
)
from tests.core_bench import attempt, tokens
from tests.prefill_worker.harness import NUM_LAYERS, Bench, prompt
from tests.simkit.fake_engine import expected_output


def test_one_prompt_from_message_to_release() -> None:
    bench = Bench(budget=64)
    (run,) = bench.prefill(prompt("a", tokens(100), first_missing_token=32))
    assert isinstance(run, RunStep)
    assert run.reports_layers
    assert (run.plan.num_tokens, run.plan.sequences[0].samples) == (64, ())
    assert isinstance(bench.sender.events[0], TransferStarted)
    assert bench.counts() == (7, 0)
    bench.step()
    assert bench.messages("a") == []
    bench.step()
    first = bench.first_tokens("a")
    assert [event.token.token_id for event in first.tokens] == expected_output(prompt("a", tokens(100)).work, 0)[:1]
    assert [(event.position, event.finish_reason) for event in first.tokens] == [(0, None)]
    assert [chunk.num_tokens for chunk in first.chunks] == [64, 36]
    assert first.num_cached_tokens == 0
    assert bench.counts() == (0, 7)
    bench.acknowledge("a")
    assert bench.counts() == (0, 0)
    assert bench.pool.stats().cached == 6


def test_timings_of_the_first_tokens_add_up() -> None:
    bench = Bench(budget=64)
    bench.prefill(prompt("a", tokens(64)))
    bench.prefill(prompt("b", tokens(96, first=500)))
    bench.step(seconds=1.0)
    bench.step(seconds=2.0)
    bench.step(seconds=4.0)
    first = bench.first_tokens("b")
    assert first.queue_s == pytest.approx(1.0)
    assert first.prefill_s == pytest.approx(6.0)
    assert [x for c in first.chunks for x in (c.start_s, c.end_s)] == pytest.approx([1.0, 3.0, 3.0, 7.0])


def test_layers_are_reported_to_the_sender_while_the_chunk_computes() -> None:
    bench = Bench(budget=64)
    bench.prefill(prompt("a", tokens(100)))
    bench.step()
    bench.step()
    reported = [(e.num_layers, e.token_end) for e in bench.sender.events if isinstance(e, TokensComputed)]
    assert reported == [(n, 64) for n in range(1, 5)] + [(n, 100) for n in range(1, 5)]
    assert isinstance(bench.sender.events[-1], FirstTokensSampled)


def test_a_step_without_layer_reports_still_counts_all_layers() -> None:
    bench = Bench(budget=64)
    bench.prefill(prompt("a", tokens(10)))
    assert bench.plan is not None
    bench.handle(StepFinished(bench.runner.run(bench.plan)))
    reported = [(e.num_layers, e.token_end) for e in bench.sender.events if isinstance(e, TokensComputed)]
    assert reported == [(NUM_LAYERS, 10)]


@pytest.mark.parametrize("budget", [1, 7, 16, 24, 100])
def test_output_does_not_depend_on_the_chunk_size(budget: int) -> None:
    bench = Bench(budget=budget)
    message = prompt("a", tokens(100))
    bench.prefill(message)
    bench.run_all()
    assert bench.first_tokens("a").tokens[0].token.token_id == expected_output(message.work, 0)[0]
    stored = [h for e in bench.effects if isinstance(e, PublishBlocks) for h in e.stored]
    assert len(stored) == len(set(stored)) == 100 // 16


@pytest.mark.parametrize(("length", "cached"), [(15, 0), (16, 0), (17, 16), (31, 16), (32, 16), (33, 32), (48, 32)])
def test_the_last_token_is_always_computed(length: int, cached: int) -> None:
    bench = Bench()
    for name in ("a", "b"):
        bench.prefill(prompt(name, tokens(length)))
        bench.run_all()
        bench.acknowledge(name)
    assert bench.first_tokens("b").num_cached_tokens == cached
    assert bench.first_tokens("a").tokens == bench.first_tokens("b").tokens


def test_cached_tokens_are_shipped_at_once_with_all_layers() -> None:
    bench = Bench()
    bench.prefill(prompt("a", tokens(64)))
    bench.run_all()
    bench.acknowledge("a")
    bench.sender.events.clear()
    bench.prefill(prompt("b", tokens(80), first_missing_token=16))
    assert bench.sender.events[1:] == [TokensComputed(TransferId(attempt("b"), 0), NUM_LAYERS, 64)]
    assert list(bench.scheduled().values()) == [16]


def test_cached_tokens_that_the_decode_worker_has_are_not_announced() -> None:
    bench = Bench()
    bench.prefill(prompt("a", tokens(64)))
    bench.run_all()
    bench.sender.events.clear()
    bench.prefill(prompt("b", tokens(80), first_missing_token=64))
    assert [type(event) for event in bench.sender.events] == [TransferStarted]


def test_prefix_of_a_running_request_is_hit() -> None:
    bench = Bench(budget=32)
    bench.prefill(prompt("a", tokens(96)))
    bench.step()
    bench.prefill(prompt("b", tokens(32) + tokens(4, first=900)))
    bench.step()
    bench.run_all()
    assert bench.first_tokens("b").num_cached_tokens == 32
    assert (
        bench.first_tokens("b").tokens[0].token.token_id
        == expected_output(prompt("b", tokens(32) + tokens(4, first=900)).work, 0)[0]
    )


def test_only_full_blocks_are_hit_and_published() -> None:
    bench = Bench()
    bench.prefill(prompt("a", tokens(20)))
    bench.run_all()
    bench.acknowledge("a")
    bench.prefill(prompt("b", tokens(24)))
    bench.run_all()
    assert bench.first_tokens("b").num_cached_tokens == 16
    published = [effect for effect in bench.effects if isinstance(effect, PublishBlocks)]
    assert [(len(p.stored), len(p.evicted)) for p in published] == [(1, 0)]


def test_evicted_prefix_is_not_hit_and_the_index_is_told() -> None:
    bench = Bench(num_blocks=8, budget=256)
    for name, token_ids in (("a", tokens(64)), ("b", tokens(128, first=500)), ("c", tokens(64))):
        bench.prefill(prompt(name, token_ids))
        bench.run_all()
        bench.acknowledge(name)
    assert bench.first_tokens("c").num_cached_tokens == 0
    assert bench.first_tokens("c").tokens[0].token == bench.first_tokens("a").tokens[0].token
    published = [effect for effect in bench.effects if isinstance(effect, PublishBlocks)]
    assert [(len(p.stored), len(p.evicted)) for p in published] == [(4, 0), (0, 4), (8, 0), (0, 4), (4, 0)]


def test_salt_separates_tenants() -> None:
    bench = Bench()
    for name, salt in (("a", b"x"), ("b", b"y"), ("c", b"x")):
        bench.prefill(prompt(name, tokens(64), salt=salt))
        bench.run_all()
    assert [bench.first_tokens(name).num_cached_tokens for name in "abc"] == [0, 0, 48]


def test_identical_cold_prompts_at_once_all_succeed_and_one_copy_survives() -> None:
    bench = Bench(num_blocks=40, budget=1024)
    names = [f"r{i}" for i in range(8)]
    bench.prefill(prompt("warm", tokens(16, first=700)))
    for name in names:
        bench.prefill(prompt(name, tokens(64)))
    bench.run_all()
    assert {bench.first_tokens(name).num_cached_tokens for name in names} == {0}
    assert len({bench.first_tokens(name).tokens[0].token.token_id for name in names}) == 1
    for name in names[1:]:
        bench.acknowledge(name)
    bench.prefill(prompt("big", tokens(16 * 20, first=1000)))  # evicts copies
    bench.run_all()
    bench.prefill(prompt("ninth", tokens(64)))
    bench.run_all()
    assert bench.first_tokens("ninth").num_cached_tokens == 48
    for name in (names[0], "warm", "big", "ninth"):
        bench.acknowledge(name)
    assert bench.counts() == (0, 0)


def test_all_choices_are_sampled_in_one_pass() -> None:
    bench = Bench()
    message = prompt("a", tokens(40), choices=(0, 1, 2))
    bench.prefill(message)
    bench.run_all()
    events = bench.first_tokens("a").tokens
    assert [event.choice_idx for event in events] == [0, 1, 2]
    assert [event.token.token_id for event in events] == [expected_output(message.work, c)[0] for c in range(3)]
    assert bench.runner.num_steps == 1
    sampled = bench.sender.events[-1]
    assert isinstance(sampled, FirstTokensSampled)
    assert [token.choice_idx for token in sampled.tokens] == [0, 1, 2]


def test_candidates_of_beams_go_to_the_decode_worker_alone() -> None:
    """Which token is first shows when the search ends: the router is told what the prefill took, and no token."""
    bench = Bench()
    beams = SamplingParams(seed=1, max_tokens=8, temperature=0.0, num_beams=2)
    bench.prefill(prompt("a", tokens(10), sampling=beams, choices=(0, 1)))
    bench.run_all()
    assert bench.first_tokens("a").tokens == ()
    assert bench.first_tokens("a").num_cached_tokens == 0
    sampled = bench.sender.events[-1]
    assert isinstance(sampled, FirstTokensSampled)
    assert [token.choice_idx for token in sampled.tokens] == [0, 1]


def test_first_token_that_ends_the_choice_says_so() -> None:
    bench = Bench()
    bench.prefill(prompt("a", tokens(10), sampling=SamplingParams(seed=1, max_tokens=1)))
    bench.run_all()
    assert bench.first_tokens("a").tokens[0].finish_reason is FinishReason.LENGTH


def test_stop_tokens_are_banned_below_min_tokens() -> None:
    """min_tokens is a property of the request, whichever worker samples: it does not clash with one first token."""
    sampling = SamplingParams(seed=1, max_tokens=8, min_tokens=5, stop_token_ids=tuple(range(49)))
    bench = Bench()
    bench.prefill(prompt("a", tokens(10), sampling=sampling))
    bench.run_all()
    event = bench.first_tokens("a").tokens[0]
    assert (event.token.token_id, event.finish_reason) == (49, None)


def test_replay_samples_at_the_next_output_position_with_its_tokens() -> None:
    """A replay after a decode worker's death: five tokens are out already, the budget is not renewed."""
    sampling = SamplingParams(seed=3, max_tokens=6, frequency_penalty=0.5)
    message = prompt("a", tokens(25), sampling=sampling)
    work = message.work.__class__(attempt("a"), tokens(25), 20, sampling)
    bench = Bench()
    bench.prefill(message.__class__(work, 0, message.decode_worker, "x", 0))
    assert bench.plan is not None
    (spec,) = bench.plan.sequences[0].samples
    assert (spec.position, spec.num_prompt_tokens, spec.token_ids) == (5, 20, tokens(25))
    bench.run_all()
    event = bench.first_tokens("a").tokens[0]
    assert (event.position, event.finish_reason) == (5, FinishReason.LENGTH)
