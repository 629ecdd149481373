"""A model with sliding and global layers, scheduled and computed: tokens are those of transformers, memory is flat.

The decode core plans, the real runner computes. Before each step all blocks that nobody refers to are filled with NaN,
so that nothing behind a window, and nothing not yet written, can be read unnoticed.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from common.engine.contract.executor import StepFinished
from common.engine.kv.block_pool import BlockPool
from common.engine.loading import LoadedModel, load_model
from common.engine.scheduling.block_tables import PoolGroup
from common.values.config import ModelConfig, WorkerConfig
from common.values.request import SamplingParams, Work
from tests.decode_worker.harness import Bench, job
from tests.interpreter import import_triton_interpreted
from tests.tiny_model import GEMMA3_FIELDS, TinyModel, write_tiny_model

transformers = pytest.importorskip("transformers")
import_triton_interpreted()

BLOCK_SIZE, WINDOW = 4, GEMMA3_FIELDS["sliding_window"]
MODEL = TinyModel(architecture="gemma3", num_layers=4)
PROMPTS = ([5, 77, 130, 9], list(range(10, 47)), [41] * 16, list(range(100, 123)))
NUM_TOKENS = 64
# Blocks of a window and of the chunk that is computed, as either may begin within one, and of the last window.
FLAT = 2 * (-(-WINDOW // BLOCK_SIZE) + 1) + 1


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", MODEL)


@pytest.fixture(scope="module")
def expected(path: Path) -> list[list[int]]:
    return continuations(path, PROMPTS)


def continuations(path: Path, prompts: Sequence[list[int]]) -> list[list[int]]:
    """What transformers goes on with, greedily; each step is computed from the whole sequence."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    return [_continued(model, prompt) for prompt in prompts]


@torch.inference_mode()
def _continued(model: Any, prompt: list[int]) -> list[int]:
    token_ids = list(prompt)
    for _ in range(NUM_TOKENS):
        token_ids.append(int(model(torch.tensor([token_ids]), use_cache=False).logits[0, -1].argmax()))
    return token_ids[len(prompt) :]


class Served(Bench):
    """A decode worker's core before the real runner."""

    def __init__(
        self, path: Path, attention: str = "cpu", budget: int = 512, num_windowed: int = 0, **fields: Any
    ) -> None:
        """`num_windowed`: blocks of the windowed group, where not all that the cache has."""
        options = {"dtype": "float32", "attention": attention, "block_size": BLOCK_SIZE, "num_threads": 1}
        config = WorkerConfig(
            role="decode",
            worker_id="d",
            model=ModelConfig(path=str(path)),
            max_num_batched_tokens=budget,
            **(options | {"num_blocks": 200} | fields),
        )
        self.loaded: LoadedModel = load_model(config)
        cache = self.loaded.cache
        groups = [
            PoolGroup(BlockPool(num_windowed if group.window and num_windowed else count, BLOCK_SIZE), group.window)
            for count, group in zip(cache.num_blocks, cache.spec.groups, strict=True)
        ]
        super().__init__(groups=groups, budget=budget, block_size=BLOCK_SIZE)
        self.most_windowed = 0

    def step(self, seconds: float = 0.01) -> list[Any]:
        plan = self._take_plan(seconds)
        for group, planes in zip(self.core.blocks.groups, self.loaded.cache.planes, strict=True):
            pool = group.pool
            unused = [b for b in range(pool.num_blocks) if b in pool._free]
            for plane in planes:
                plane[:, unused] = torch.nan
        windowed = self.core.blocks.groups[1].pool.stats()
        self.most_windowed = max(self.most_windowed, windowed.used)
        return self.handle(StepFinished(replace(self.loaded.runner.run(plan), duration_s=seconds)))

    def ask(self, name: str, prompt: list[int], max_tokens: int = NUM_TOKENS) -> Work:
        params = SamplingParams(seed=0, max_tokens=max_tokens, temperature=0.0)
        work = job(name, tuple(prompt), sampling=params)
        self.reserve(work, local=1 << 20)
        return work


@pytest.mark.parametrize(("attention", "budget", "num_tokens"), [("cpu", 512, 64), ("cpu", 7, 64), ("triton", 7, 6)])
def test_whole_prompts_and_chunks_of_seven_give_the_tokens_of_transformers(
    path: Path, expected: list[list[int]], attention: str, budget: int, num_tokens: int
) -> None:
    """Fewer of them under Triton's interpreter, which is slow."""
    served = Served(path, attention, budget)
    groups = served.loaded.cache.spec.groups
    assert [(group.layers, group.window) for group in groups] == [((2,), 0), ((0, 1, 3), WINDOW)]
    for idx, prompt in enumerate(PROMPTS):
        served.ask(str(idx), prompt, num_tokens)
    served.run_all()
    assert [served.output(str(idx)) for idx in range(len(PROMPTS))] == [tokens[:num_tokens] for tokens in expected]


def test_a_prefix_hit_gives_the_tokens_of_transformers(path: Path, expected: list[list[int]]) -> None:
    served = Served(path)
    for idx, prompt in enumerate(PROMPTS):
        for name in (f"cold {idx}", f"warm {idx}"):
            served.ask(name, prompt)
            served.run_all()
            assert served.output(name) == expected[idx]
        report = served.messages(f"warm {idx}")[-1]
        assert report.num_cached_tokens == (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE


def test_preempted_sequences_give_the_tokens_of_transformers(path: Path, expected: list[list[int]]) -> None:
    served = Served(path, num_blocks=32)
    for idx, prompt in enumerate(PROMPTS):
        served.ask(str(idx), prompt)
    served.run_all()
    assert served.core.role.state.scheduler.num_preemptions > 0
    assert [served.output(str(idx)) for idx in range(len(PROMPTS))] == expected


@pytest.mark.parametrize("num_prompt_tokens", [10, 400])
def test_blocks_of_a_windowed_group_are_bounded_while_a_sequence_grows_to_many_windows(
    path: Path, num_prompt_tokens: int
) -> None:
    served = Served(path, budget=BLOCK_SIZE, num_blocks=200)
    served.ask("a", [idx * 7 % 250 + 3 for idx in range(num_prompt_tokens)], max_tokens=300)
    served.run_all()
    assert len(served.output("a")) == 300
    assert served.most_windowed <= FLAT
    assert (300 + num_prompt_tokens) / 8 > FLAT * BLOCK_SIZE


def test_two_windows_and_two_blocks_are_enough_for_a_sequence(path: Path, expected: list[list[int]]) -> None:
    served = Served(path, num_windowed=2 * (-(-WINDOW // BLOCK_SIZE) + 1))
    for idx, prompt in enumerate(PROMPTS):
        served.ask(str(idx), prompt)
        served.run_all()
        assert served.output(str(idx)) == expected[idx]
