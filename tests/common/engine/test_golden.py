"""The demo model against Hugging Face transformers: 24 prompts, greedy, float32, token for token."""

import json
from contextlib import closing
from typing import Any

import jinja2
import pytest

from common.checkpoint import Checkpoint, open_checkpoint
from common.checkpoint.demo_model import fetch_demo_model
from common.engine.devices.cpu.native.build import SWITCH
from common.engine.loading import load_model
from common.values.config import ModelConfig, WorkerConfig
from common.values.request import SamplingParams
from tests.common.engine.drive import Generation, blocks_for, run_all
from tests.paths import GOLDEN_FILE

pytestmark = pytest.mark.model

GOLDEN: list[dict[str, Any]] = json.loads(GOLDEN_FILE.read_text())
SHORT = [case for case in GOLDEN if len(case["prompt_token_ids"]) <= 256]
LONG = [case for case in GOLDEN if len(case["prompt_token_ids"]) > 256]
BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint(fetch_demo_model(print))


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["id"])
def test_prompts_become_the_same_token_ids(checkpoint: Checkpoint, case: dict[str, Any]) -> None:
    text = case.get("prompt")
    if "messages" in case:
        assert checkpoint.chat_template is not None
        environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
        template = environment.from_string(checkpoint.chat_template)
        text = template.render(messages=case["messages"], add_generation_prompt=True)
    encoded = checkpoint.tokenizer().encode(text, add_special_tokens=False)
    assert encoded.ids == case["prompt_token_ids"]


def test_output_ids_become_the_same_text(checkpoint: Checkpoint) -> None:
    for case in GOLDEN:
        assert checkpoint.tokenizer().decode(case["output_token_ids"]) == case["output_text"]


def test_both_end_tokens_are_known(checkpoint: Checkpoint) -> None:
    assert checkpoint.eos_token_ids == (2, 0)


@pytest.mark.parametrize("native", ["1", "0"], ids=["native", "torch"])
@pytest.mark.parametrize(("cases", "chunk"), [(SHORT, 64), (LONG, 512)], ids=["short", "long"])
def test_all_prompts_at_once_give_the_reference_tokens_and_logprobs(
    checkpoint: Checkpoint, cases: list[dict[str, Any]], chunk: int, native: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, native)
    capacity = [len(case["prompt_token_ids"]) + case["n"] for case in cases]
    num_blocks = sum(-(-length // BLOCK_SIZE) for length in capacity)
    model = ModelConfig(path=str(checkpoint.path))
    config = WorkerConfig(
        role="decode", worker_id="d", model=model, dtype="float32", attention="cpu", num_blocks=num_blocks
    )
    tables = blocks_for(capacity, BLOCK_SIZE, num_blocks)
    batch = [generation(case, table, checkpoint) for case, table in zip(cases, tables, strict=True)]
    run_all(load_model(config).runner, batch, chunk)
    for case, done in zip(cases, batch, strict=True):
        assert done.output == case["output_token_ids"], case["id"]
        assert [token.logprob for token in done.tokens] == pytest.approx(case["logprobs"], abs=1e-3), case["id"]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_give_the_reference_tokens(checkpoint: Checkpoint, num_ranks: int) -> None:
    """Nine query and three KV heads: two ranks share them unevenly, three evenly."""
    cases = SHORT[:3]
    capacity = [len(case["prompt_token_ids"]) + case["n"] for case in cases]
    num_blocks = sum(-(-length // BLOCK_SIZE) for length in capacity)
    tables = blocks_for(capacity, BLOCK_SIZE, num_blocks)
    batch = [generation(case, table, checkpoint) for case, table in zip(cases, tables, strict=True)]
    model, sizes = ModelConfig(path=str(checkpoint.path)), {"num_blocks": num_blocks, "num_threads": 1}
    config = WorkerConfig(role="decode", worker_id="d", model=model, dtype="float32", attention="cpu", **sizes)
    with closing(load_model(config.model_copy(update={"tensor_parallel_size": num_ranks}))) as loaded:
        run_all(loaded.runner, batch, 64)
    assert [done.output for done in batch] == [case["output_token_ids"] for case in cases]


def generation(case: dict[str, Any], table: tuple[int, ...], checkpoint: Checkpoint) -> Generation:
    stops = checkpoint.eos_token_ids
    params = SamplingParams(seed=0, max_tokens=case["n"], temperature=0.0, num_logprobs=0, stop_token_ids=stops)
    return Generation(case["prompt_token_ids"], params, table)
