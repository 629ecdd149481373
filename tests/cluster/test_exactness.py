"""Disaggregated output equals one process: sampling, several choices, preemption, the Triton path."""

from pathlib import Path

import pytest

from common.config import ModelConfig, WorkerConfig
from common.engine.loading import load_model
from common.request import SamplingParams
from tests.cluster.cluster import running_cluster
from tests.cluster.load import Case, random_cases, run_all, wrong
from tests.common.engine import drive as driving

DISAGGREGATED = ("--dtype", "float32", "--local-prefill-max-tokens", "0")


async def test_seeded_sampling_and_four_choices(tiny_model: Path) -> None:
    """1. 40 sampled requests; 2. 10 with n = 4; 3. 10 greedy ones; all at once on 2P+2D with unequal blocks."""
    config = {"prefill_worker": {"block_size": 16}, "decode_worker": {"block_size": 32}}
    cases = random_cases(40, seed=1) + random_cases(10, seed=2, num_choices=4) + random_cases(10, 3, temperature=0.0)
    with running_cluster(tiny_model, *DISAGGREGATED, prefill=2, decode=2, config=config) as cluster:
        assert wrong(tiny_model, cases, await run_all(cluster.url, "tiny", cases)) == []


async def test_a_pool_too_small_for_the_load_preempts_and_stays_exact(tiny_model: Path) -> None:
    """1. 32 blocks, 16 requests that grow to 15 blocks each; 2. preemptions happened; 3. every token is right."""
    config = {"decode_worker": {"num_blocks": 32, "block_size": 16}}
    cases = random_cases(16, seed=4, max_tokens=60)
    with running_cluster(tiny_model, *DISAGGREGATED, config=config) as cluster:
        answers = await run_all(cluster.url, "tiny", cases)
        assert wrong(tiny_model, cases, answers) == []
        assert cluster.workers("decode")[0]["num_preemptions"] > 0


async def test_a_long_prompt_prefilled_locally_equals_a_shipped_one(tiny_model: Path) -> None:
    cases = random_cases(20, seed=5)
    options = ("--dtype", "float32", "--local-prefill-max-tokens", "64")
    with running_cluster(tiny_model, *options) as cluster:
        assert wrong(tiny_model, cases, await run_all(cluster.url, "tiny", cases)) == []


async def test_a_quantized_cache_gives_the_tokens_of_one_process_that_has_it(tiny_model: Path) -> None:
    """Blocks of different sizes on both sides; what one process says is asked of its runner, not of the oracle."""
    config = {"prefill_worker": {"block_size": 16}, "decode_worker": {"block_size": 32}}
    cases = random_cases(16, seed=7, temperature=0.0)
    expected = _outputs_of_one_process(tiny_model, cases)
    with running_cluster(tiny_model, *DISAGGREGATED, "--kv-cache-dtype", "int8", config=config) as cluster:
        answers = await run_all(cluster.url, "tiny", cases)
    assert [answer[0].token_ids for answer in answers] == expected
    assert expected != [case.expected(tiny_model)[0] for case in cases]  # the cache was quantized indeed


def _outputs_of_one_process(path: Path, cases: list[Case]) -> list[list[int]]:
    model = ModelConfig(path=str(path))
    options = {"dtype": "float32", "attention": "cpu", "num_blocks": 300, "kv_cache_dtype": "int8"}
    loaded = load_model(WorkerConfig(role="decode", worker_id="d", model=model, **options))
    capacity = [len(case.token_ids) + case.max_tokens for case in cases]
    tables = driving.blocks_for(capacity, 16, 300)
    batch = [
        driving.Generation(
            list(case.token_ids),
            SamplingParams(seed=case.seed, max_tokens=case.max_tokens, temperature=0.0),
            table,
        )
        for case, table in zip(cases, tables, strict=True)
    ]
    driving.run_all(loaded.runner, batch, 512)
    return [generation.output for generation in batch]


@pytest.mark.timeout(600)
async def test_the_triton_path_gives_the_tokens_of_the_cpu_path(tiny_model: Path) -> None:
    """The kernels of a GPU under the interpreter, in the whole service."""
    cases = random_cases(4, seed=6, max_tokens=6)
    options = (*DISAGGREGATED, "--attention", "triton")
    with running_cluster(tiny_model, *options) as cluster:
        assert wrong(tiny_model, cases, await run_all(cluster.url, "tiny", cases, at_once=4)) == []
