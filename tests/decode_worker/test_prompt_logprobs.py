"""Logprobs of prompts on a decode worker: where it computes the prompt itself, and nowhere else."""

from dataclasses import replace

from common.values.messages import Granted, HandoffReport, PromptScored
from common.values.request import Work
from tests.core_bench import tokens
from tests.decode_worker.harness import Bench, job
from tests.simkit.fake_engine import expected_logprobs, expected_output


def scored_job(name: str, token_ids: tuple[int, ...], max_tokens: int = 8) -> Work:
    return replace(job(name, token_ids, max_tokens), num_prompt_logprobs=0)


def logprobs_of(bench: Bench, name: str) -> list[float]:
    parts = [message for message in bench.messages(name) if isinstance(message, PromptScored)]
    return [logprob for part in parts for logprob in part.scores.logprobs]


def test_a_local_prompt_is_scored_from_its_beginning_before_its_tokens() -> None:
    """The same prompt is cached; so few tokens would be missing that another request would be local for it."""
    bench, token_ids = Bench(budget=16), tokens(40)
    bench.reserve(job("a", token_ids), local=64)
    bench.run_all()
    work = scored_job("b", token_ids)
    bench.reserve(work, local=64)
    bench.run_all()
    kinds = [type(message) for message in bench.messages("b")]
    assert kinds[0] is Granted and set(kinds[1:-1]) == {PromptScored} and kinds[-1] is HandoffReport
    assert logprobs_of(bench, "b") == expected_logprobs(token_ids)
    assert bench.output("b") == expected_output(work, 0)


def test_what_is_cached_is_not_sent_again_and_does_not_make_a_scored_prompt_local() -> None:
    """1. 32 of 40 tokens are cached; 2. 8 missing would be local, 40 to compute are not; 3. only 8 are to be sent."""
    bench, token_ids = Bench(), tokens(40)
    bench.reserve(job("a", token_ids), local=64)
    bench.run_all()
    work = scored_job("b", token_ids)
    bench.reserve(work, local=8)
    assert bench.messages("b") == [Granted(work.attempt_id, 32, is_local=False)]
    bench.deliver(work)
    bench.run_all()
    assert logprobs_of(bench, "b") == []
    assert bench.output("b") == expected_output(work, 0)


def test_a_preempted_sequence_is_computed_again_and_not_scored_again() -> None:
    """A pool too small for both: the younger sits out, after its prompt was scored."""
    bench = Bench(num_blocks=8, block_size=4, budget=32)
    works = [scored_job(name, tokens(10, first=idx), 16) for idx, name in enumerate("ab")]
    for work in works:
        bench.reserve(work, local=64)
    bench.run_all()
    assert bench.core.role.state.scheduler.num_preemptions > 0
    for idx, (name, work) in enumerate(zip("ab", works, strict=True)):
        assert bench.output(name) == expected_output(work, 0)
        assert logprobs_of(bench, name) == expected_logprobs(tokens(10, first=idx))
