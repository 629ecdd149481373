"""A model with sliding and global layers, scheduled and computed: tokens are those of transformers, memory is flat."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.common.engine.served import Served
from tests.interpreter import import_triton_interpreted
from tests.tiny_model import WINDOW, TinyModel, write_tiny_model

transformers = pytest.importorskip("transformers")
import_triton_interpreted()

BLOCK_SIZE = 4
MODEL = TinyModel(architecture="gemma3", num_layers=4)
PLAIN = TinyModel(num_layers=4)
# By family: the model, what its config.json has besides, and the layers that have a window.
FAMILIES: dict[str, tuple[TinyModel, dict[str, Any], tuple[int, ...]]] = {
    "gemma3": (MODEL, {}, (0, 1, 3)),
    "mistral": (replace(PLAIN, architecture="mistral"), {}, (0, 1, 2, 3)),
    "qwen2": (
        replace(PLAIN, architecture="qwen2"),
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
        (1, 2, 3),
    ),
    "qwen3": (
        replace(PLAIN, architecture="qwen3"),
        {
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
        },
        (1, 3),
    ),
}
PROMPTS = ([5, 77, 130, 9], list(range(10, 47)), [41] * 16, list(range(100, 123)))
NUM_TOKENS = 64
# The window that moves with what is computed and the last one, as either may begin within a block; a block of a chunk.
LAST_WINDOWS = 2 * (-(-WINDOW // BLOCK_SIZE) + 1)
FLAT = LAST_WINDOWS + 1


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def path(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, changes, _ = FAMILIES[family]
    path = write_tiny_model(tmp_path_factory.mktemp(family), model)
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def expected(path: Path) -> list[list[int]]:
    found = continuations(path, PROMPTS)
    assert all(len(set(tokens)) > NUM_TOKENS // 4 for tokens in found), "a dull model proves little"
    return found


def continuations(path: Path, prompts: Sequence[list[int]], num_tokens: int = NUM_TOKENS) -> list[list[int]]:
    """What transformers goes on with, greedily; each step is computed from the whole sequence."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    return [_continued(model, prompt, num_tokens) for prompt in prompts]


@torch.inference_mode()
def _continued(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(int(model(torch.tensor([token_ids]), use_cache=False).logits[0, -1].argmax()))
    return token_ids[len(prompt) :]


def serve(path: Path, **fields: Any) -> Served:
    options = {"dtype": "float32", "attention": "cpu", "block_size": BLOCK_SIZE, "num_threads": 1, "num_blocks": 200}
    return Served(path, fills_unused=True, **(options | fields))


@pytest.mark.parametrize("chunk", [512, 7])
def test_whole_prompts_and_chunks_of_seven_give_the_tokens_of_transformers(
    family: str, path: Path, expected: list[list[int]], chunk: int
) -> None:
    served = serve(path, max_num_batched_tokens=chunk)
    windowed = FAMILIES[family][2]
    groups = [(group.layers, group.window) for group in served.loaded.cache.spec.groups]
    others = tuple(layer for layer in range(4) if layer not in windowed)
    assert groups == ([(others, 0)] if others else []) + [(windowed, WINDOW)]
    for idx, prompt in enumerate(PROMPTS):
        served.ask(str(idx), prompt, NUM_TOKENS)
    served.run_all()
    assert [served.output(str(idx)) for idx in range(len(PROMPTS))] == expected


def test_triton_kernels_give_the_same_tokens(tmp_path: Path) -> None:
    """Six of them: the interpreter is slow."""
    path = write_tiny_model(tmp_path, MODEL)
    expected = continuations(path, PROMPTS[1:3], 6)
    served = serve(path, attention="triton", max_num_batched_tokens=20)
    for idx, prompt in enumerate(PROMPTS[1:3]):
        served.ask(str(idx), prompt, 6)
    served.run_all()
    assert [served.output(str(idx)) for idx in range(2)] == expected


def test_a_prefix_hit_gives_the_tokens_of_transformers(path: Path, expected: list[list[int]]) -> None:
    served = serve(path)
    for idx, prompt in enumerate(PROMPTS):
        for name in (f"cold {idx}", f"warm {idx}"):
            served.ask(name, prompt, NUM_TOKENS)
            served.run_all()
            assert served.output(name) == expected[idx]
        report = served.messages(f"warm {idx}")[-1]
        assert report.num_cached_tokens == (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE


def test_preempted_sequences_give_the_tokens_of_transformers(
    family: str, path: Path, expected: list[list[int]]
) -> None:
    served = serve(path, num_blocks=32)  # of Mistral's windows there are enough for all, at any length
    for idx, prompt in enumerate(PROMPTS):
        served.ask(str(idx), prompt, NUM_TOKENS)
    served.run_all()
    assert (served.core.role.state.scheduler.num_preemptions > 0) == (family != "mistral")
    assert [served.output(str(idx)) for idx in range(len(PROMPTS))] == expected


def test_blocks_of_a_windowed_group_are_bounded_while_a_sequence_grows_to_many_windows(path: Path) -> None:
    num_prompt_tokens, num_output_tokens = 200, 150
    served = serve(path, max_num_batched_tokens=BLOCK_SIZE)
    served.ask("a", [idx * 7 % 250 + 3 for idx in range(num_prompt_tokens)], num_output_tokens)
    served.run_all()
    assert len(served.output("a")) == num_output_tokens
    *full, windowed = served.most_used
    num_computed = num_prompt_tokens + num_output_tokens - 1
    assert full in ([], [-(-num_computed // BLOCK_SIZE)])
    assert windowed <= FLAT
    assert num_computed > 8 * FLAT * BLOCK_SIZE


def test_two_windows_and_two_blocks_are_enough_for_a_sequence(path: Path, expected: list[list[int]]) -> None:
    served = serve(path, num_windowed=LAST_WINDOWS)
    for idx, prompt in enumerate(PROMPTS):
        served.ask(str(idx), prompt, NUM_TOKENS)
        served.run_all()
        assert served.output(str(idx)) == expected[idx]
