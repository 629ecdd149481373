"""64 greedy tokens of each family and their log-probabilities are those of transformers, however they are computed."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from common.engine.loading import LoadedModel, load_model
from common.values.config import ModelConfig, WorkerConfig
from common.values.request import SampledToken, SamplingParams
from tests.common.engine.drive import Generation, blocks_for, run_all
from tests.tiny_model import FAMILIES, write_tiny_model

transformers = pytest.importorskip("transformers")

PROMPT = [5, 77, 130, 9, 200, 41, 41, 270, 3, 18, 99, 64, 250, 7, 7, 7, 161, 12, 33, 88]
PARAMS = SamplingParams(seed=1, max_tokens=64, temperature=0.0, num_logprobs=1)


def load(path: Path, block_size: int = 8, attention: str = "cpu") -> LoadedModel:
    fields = {"dtype": "float32", "attention": attention, "block_size": block_size, "num_blocks": 64, "num_threads": 1}
    return load_model(WorkerConfig(role="decode", worker_id="d", model=ModelConfig(path=str(path)), **fields))


def new_generation(loaded: LoadedModel) -> Generation:
    (table,) = blocks_for([len(PROMPT) + PARAMS.max_tokens], loaded.cache.block_size, 64)
    return Generation(list(PROMPT), PARAMS, table, num_groups=len(loaded.cache.spec.groups))


def whole(path: Path) -> list[SampledToken]:
    loaded = load(path)
    generation = new_generation(loaded)
    run_all(loaded.runner, [generation], 64)
    return generation.tokens


def in_chunks_of_7(path: Path) -> list[SampledToken]:
    loaded = load(path)
    generation = new_generation(loaded)
    run_all(loaded.runner, [generation], 7)
    return generation.tokens


def after_a_prefix_hit(path: Path) -> list[SampledToken]:
    """Two blocks of the prompt are there, from a sequence that went on otherwise."""
    loaded = load(path)
    generation = new_generation(loaded)
    table = (*generation.block_table[:2], *range(8, 20))
    other = Generation([*PROMPT[:16], 99], PARAMS, table, num_groups=generation.num_groups)
    run_all(loaded.runner, [other], 64)
    generation.num_done = 16
    run_all(loaded.runner, [generation], 64)
    return generation.tokens


def handed_over_to_other_blocks(path: Path) -> list[SampledToken]:
    """The prompt's KV, computed in blocks of 8, is copied into blocks of 4 of another worker's cache."""
    sender, receiver = load(path), load(path, block_size=4)
    first, generation = new_generation(sender), new_generation(receiver)
    first.params = SamplingParams(seed=1, max_tokens=1, temperature=0.0, num_logprobs=1)
    run_all(sender.runner, [first], 64)
    for source, target in zip(sender.cache.layers, receiver.cache.layers, strict=True):
        for ours, theirs in zip(source, target, strict=True):
            for position in range(len(PROMPT)):
                block, offset = generation.block_table[position // 4], position % 4
                theirs[block, offset] = ours[first.block_table[position // 8], position % 8]
    generation.tokens, generation.num_done = first.tokens, len(PROMPT)
    run_all(receiver.runner, [generation], 64)
    return generation.tokens


def after_preemption(path: Path) -> list[SampledToken]:
    """Cut off within its output, the KV lost; it begins again with what it has."""
    loaded = load(path)
    generation = new_generation(loaded)
    generation.params = SamplingParams(seed=1, max_tokens=20, temperature=0.0, num_logprobs=1)
    run_all(loaded.runner, [generation], 64)
    for layer in loaded.cache.layers:
        for plane in layer:
            plane.zero_()
    generation.params, generation.num_done = PARAMS, 0
    run_all(loaded.runner, [generation], 7)
    return generation.tokens


WAYS = (whole, in_chunks_of_7, after_a_prefix_hit, handed_over_to_other_blocks, after_preemption)


@pytest.fixture(params=FAMILIES, scope="module")
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("greedy") / "m", FAMILIES[request.param])


@pytest.fixture(scope="module")
def expected(path: Path) -> tuple[list[int], list[float]]:
    """Token ids and the log-probability of each."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    token_ids = list(PROMPT)
    logprobs = []
    with torch.inference_mode():
        output = model(torch.tensor([token_ids]), use_cache=True)
        for _ in range(PARAMS.max_tokens):
            row = output.logits[0, -1].log_softmax(-1)
            token_ids.append(int(row.argmax()))
            logprobs.append(float(row.max()))
            output = model(torch.tensor([token_ids[-1:]]), cache=output.past_key_values, use_cache=True)
    return token_ids[len(PROMPT) :], logprobs


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_greedy_tokens_and_logprobs_are_those_of_transformers(
    path: Path, expected: tuple[list[int], list[float]], way: Callable[[Path], list[SampledToken]]
) -> None:
    tokens = way(path)
    assert [token.token_id for token in tokens] == expected[0]
    found = torch.tensor([token.logprob for token in tokens])
    torch.testing.assert_close(found, torch.tensor(expected[1]), atol=1e-3, rtol=0)
