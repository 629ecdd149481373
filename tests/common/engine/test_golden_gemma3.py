"""Gemma 3 270M against transformers: nine prompts, greedy, float32, token for token; one is past the window.

The terms of the model do not let us pass it on: docs/models.md says how to put it where `MODEL` is, else this skips.
"""

import json
from contextlib import closing
from typing import Any

import pytest

from common.checkpoint import Checkpoint, open_checkpoint
from common.checkpoint.demo_model import cache_directory
from common.engine.loading import load_model
from common.values.config import ModelConfig, WorkerConfig
from common.values.request import SamplingParams
from tests.common.engine.drive import Generation, blocks_for, run_all
from tests.paths import GOLDEN_FILE

MODEL = cache_directory() / "gemma-3-270m-q4_k_m.gguf"
pytestmark = [pytest.mark.model, pytest.mark.skipif(not MODEL.is_file(), reason=f"no {MODEL}")]

GOLDEN: list[dict[str, Any]] = json.loads(GOLDEN_FILE.with_name("gemma3_270m_greedy.json").read_text())["cases"]
BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint(MODEL)


def test_prompts_become_the_same_token_ids(checkpoint: Checkpoint) -> None:
    for case in GOLDEN:
        if case["text"] is not None:
            assert checkpoint.tokenizer().encode(case["text"]).ids == case["prompt_token_ids"], case["id"]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_all_prompts_at_once_give_the_reference_tokens_and_logprobs(checkpoint: Checkpoint, num_ranks: int) -> None:
    """Two ranks hold its one KV head both, and share the query heads."""
    capacity = [len(case["prompt_token_ids"]) + len(case["output_token_ids"]) for case in GOLDEN]
    num_blocks = sum(-(-length // BLOCK_SIZE) for length in capacity)
    config = WorkerConfig(
        role="decode",
        worker_id="d",
        model=ModelConfig(path=str(checkpoint.path)),
        dtype="float32",
        attention="cpu",
        num_blocks=num_blocks,
        tensor_parallel_size=num_ranks,
    )
    tables = blocks_for(capacity, BLOCK_SIZE, num_blocks)
    batch = [generation(case, table) for case, table in zip(GOLDEN, tables, strict=True)]
    with closing(load_model(config)) as loaded:
        run_all(loaded.runner, batch, 256)
    for case, done in zip(GOLDEN, batch, strict=True):
        assert done.output == case["output_token_ids"], case["id"]
        assert [token.logprob for token in done.tokens] == pytest.approx(case["logprobs"], abs=1e-3), case["id"]


def generation(case: dict[str, Any], table: tuple[int, ...]) -> Generation:
    length = len(case["output_token_ids"])
    params = SamplingParams(seed=0, max_tokens=length, temperature=0.0, num_logprobs=0)
    return Generation(case["prompt_token_ids"], params, table, num_groups=2)
