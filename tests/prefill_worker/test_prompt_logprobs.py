"""Logprobs of prompts on a prefill worker: each once, ahead of the first tokens, whatever is cached."""

from dataclasses import replace

from common.engine.scheduling.scheduler import MAX_SCORED_TOKENS
from common.values.messages import FirstTokens, Prefill, PromptScored
from tests.core_bench import attempt, tokens
from tests.prefill_worker.harness import Bench, prompt
from tests.simkit.fake_engine import expected_logprobs, expected_output


def scored_prompt(name: str, token_ids: tuple[int, ...], prefill_try: int = 0) -> Prefill:
    message = prompt(name, token_ids, prefill_try=prefill_try)
    return replace(message, work=replace(message.work, num_prompt_logprobs=0))


def logprobs_of(bench: Bench, name: str) -> list[float]:
    """Of all parts, asserting that they follow one another and that first tokens come after them."""
    messages = bench.messages(name)
    parts = [message for message in messages if isinstance(message, PromptScored)]
    assert [type(message) for message in messages] == [PromptScored] * len(parts) + [FirstTokens]
    assert [part.scores.start for part in parts] == [1, *(part.scores.end for part in parts)][:-1]
    return [logprob for part in parts for logprob in part.scores.logprobs]


def test_each_chunk_tells_its_own_before_the_first_tokens() -> None:
    bench, token_ids = Bench(budget=16), tokens(40)
    bench.prefill(scored_prompt("a", token_ids, prefill_try=3))
    bench.run_all()
    assert logprobs_of(bench, "a") == expected_logprobs(token_ids)
    assert len(bench.messages("a")) == 4
    assert {message.prefill_try for message in bench.messages("a")} == {3}


def test_a_cached_prefix_is_computed_again_and_its_blocks_stay_findable() -> None:
    """1. a prompt is cached; 2. the same, with logprobs, hits nothing; 3. without them it hits what is there."""
    bench, token_ids = Bench(), tokens(40)
    for name, message in (
        ("a", prompt("a", token_ids)),
        ("b", scored_prompt("b", token_ids)),
        ("c", prompt("c", token_ids)),
    ):
        bench.prefill(message)
        bench.run_all()
        bench.acknowledge(name)
    assert logprobs_of(bench, "b") == expected_logprobs(token_ids)
    hits = [message.num_cached_tokens for message in bench.sent if isinstance(message, FirstTokens)]
    assert hits == [0, 0, 32]
    fresh = tokens(40, first=3)
    bench.prefill(scored_prompt("d", fresh))
    bench.run_all()
    bench.prefill(prompt("e", fresh))
    bench.run_all()
    assert bench.first_tokens("e").num_cached_tokens == 32


def test_a_step_scores_no_more_tokens_than_it_may_and_goes_on_with_others() -> None:
    """Two scored prompts share the rows of a step; a prompt without logprobs has the rest of it."""
    bench = Bench(num_blocks=200, budget=1000)
    long = tuple(position % 50 for position in range(MAX_SCORED_TOKENS + 100))
    bench.prefill(scored_prompt("a", long))
    bench.run_all()
    assert logprobs_of(bench, "a") == expected_logprobs(long)
    bench.prefill(prompt("busy", tokens(4)))  # so that the others begin together
    for name in "bcd":
        token_ids = tuple((position * 7 + ord(name)) % 50 for position in range(200))
        bench.prefill(prompt(name, token_ids) if name == "d" else scored_prompt(name, token_ids))
    bench.step()
    counts = list(bench.scheduled().values())
    assert counts == [200, MAX_SCORED_TOKENS - 200, 200]
    bench.run_all()
    assert [len(logprobs_of(bench, name)) for name in "bc"] == [199, 199]


def test_a_prompt_of_one_token_has_no_logprobs() -> None:
    bench = Bench()
    bench.prefill(scored_prompt("a", (7,)))
    bench.run_all()
    assert [type(message) for message in bench.messages("a")] == [FirstTokens]


def test_a_replay_whose_logprobs_are_out_is_not_scored() -> None:
    bench = Bench()
    message = prompt("a", tokens(20))
    bench.prefill(replace(message, work=replace(message.work, num_prompt_tokens=18)))
    bench.run_all()
    (first,) = bench.first_tokens("a").tokens
    assert first.token.token_id == expected_output(replace(message.work, num_prompt_tokens=18), 0)[0]
    assert bench.first_tokens("a").attempt_id == attempt("a")
