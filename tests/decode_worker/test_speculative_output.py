"""The real core, scheduler and runner with speculation give the output of one process, token for token, in float32."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from common.engine.contract.executor import StepFinished
from common.engine.kv.block_pool import BlockPool
from common.engine.loading import LoadedModel
from common.engine.scheduling.block_tables import PoolGroup
from common.guided import grammar
from common.values.request import SampledToken, SamplingParams
from tests.decode_worker.harness import Bench, job
from tests.decode_worker.tiny_loaded import load_tiny
from tests.one_process import generate, generate_tokens
from tests.tiny_model import write_tiny_model

BLOCK_SIZE = 4
NUM_BLOCKS = 200
PROMPTS = [(5, 77, 130, 9), (41,) * 16, tuple(range(10, 47)), (7, 8, 9, 10, 7, 8, 9)]
GREEDY = SamplingParams(seed=1, max_tokens=40, temperature=0.0)
KINDS = {
    "greedy": GREEDY,
    "sampled": replace(GREEDY, temperature=0.4, num_logprobs=2),
    "penalties": replace(GREEDY, presence_penalty=0.3, frequency_penalty=0.1, repetition_penalty=1.05),
    "min_tokens": replace(GREEDY, min_tokens=20, stop_token_ids=tuple(range(3, 200, 2))),
    "bad words": replace(GREEDY, bad_words=((41, 41),)),
    "guided": replace(GREEDY, grammar=grammar.of_regex("(ab|cd){30,60}")),
}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def loaded(model_path: Path) -> LoadedModel:
    return load_tiny(model_path, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)


def run(loaded: LoadedModel, params: SamplingParams, *, num_blocks: int = NUM_BLOCKS, num_choices: int = 1) -> Bench:
    """All prompts in one batch. Every step takes as long, so drafts always pay."""
    groups = [PoolGroup(BlockPool(num_blocks, BLOCK_SIZE))]
    bench = Bench(max_num_seqs=16, max_num_waiting=16, groups=groups, max_draft_tokens=7)
    for number, prompt in enumerate(PROMPTS):
        work = job(f"r{number}", prompt, sampling=params, choices=tuple(range(num_choices)))
        bench.reserve(work, local=1000)
    bench.num_drafts = Counter()  # type: ignore[attr-defined]
    while bench.plan is not None:
        plan, bench.plan = bench.plan, None
        result = loaded.runner.run(plan)
        accepted = sum(len(run) - 1 for row in result.results for run in row.runs)
        bench.num_drafts.update(accepted=accepted)  # type: ignore[attr-defined]
        bench.handle(StepFinished(replace(result, duration_s=0.01)))
    return bench


@pytest.mark.parametrize("kind", KINDS)
def test_output_is_that_of_one_process(loaded: LoadedModel, model_path: Path, kind: str) -> None:
    bench = run(loaded, KINDS[kind])
    for number, prompt in enumerate(PROMPTS):
        assert [bench.output(f"r{number}")] == generate(model_path, prompt, KINDS[kind])
    assert bench.num_drafts["accepted"] > 0, "nothing was speculated"  # type: ignore[attr-defined]
    assert bench.counts() == (0, 0)


def test_logprobs_of_drafted_tokens_are_those_of_one_process(loaded: LoadedModel, model_path: Path) -> None:
    params = KINDS["sampled"]
    bench = run(loaded, params)
    for number, prompt in enumerate(PROMPTS):
        (expected,) = generate_tokens(model_path, prompt, params)
        for event, token in zip(bench.events(f"r{number}"), expected, strict=True):
            assert_alike(event.token, token)


def assert_alike(ours: SampledToken, other: SampledToken) -> None:
    assert ours.logprob == pytest.approx(other.logprob, abs=1e-4)
    assert [token_id for token_id, _ in ours.top] == [token_id for token_id, _ in other.top]


def test_several_choices_are_those_of_one_process(loaded: LoadedModel, model_path: Path) -> None:
    params = KINDS["sampled"]
    bench = run(loaded, params, num_choices=4)
    for number, prompt in enumerate(PROMPTS):
        outputs = [bench.output(f"r{number}", choice) for choice in range(4)]
        assert outputs == generate(model_path, prompt, params, range(4))


def test_output_after_preemption_is_that_of_one_process(loaded: LoadedModel, model_path: Path) -> None:
    bench = run(loaded, GREEDY, num_blocks=32)
    assert bench.core.role.state.scheduler.num_preemptions > 0
    for number, prompt in enumerate(PROMPTS):
        assert [bench.output(f"r{number}")] == generate(model_path, prompt, GREEDY)
