"""Each kind of RoPE scaling gives the logits of transformers, wherever config.json states it, and from GGUF."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from common.checkpoint import CheckpointError, open_checkpoint
from tests.common.engine.model.test_architectures import TOKENS, forward_in_chunks, load
from tests.tiny_gguf import write_tiny_gguf
from tests.tiny_model import TinyModel, write_tiny_model

transformers = pytest.importorskip("transformers")

LENGTH = 2048  # the tiny model's max_position_embeddings
ORIGINAL = 8  # of 20 tokens
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 8.0, 16.0, 32.0],
    "original_max_position_embeddings": ORIGINAL,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": YARN,
    "yarn of DeepSeek": YARN | {"mscale": 0.707, "mscale_all_dim": 1.4, "beta_fast": 20, "beta_slow": 2},
    "yarn with a factor of attention": YARN | {"attention_factor": 1.3},
    "yarn that is not truncated": YARN | {"truncate": False, "beta_fast": 7},
    "longrope": LONGROPE,
    "longrope with a factor": LONGROPE | {"factor": 7.0},
    "longrope with a factor of attention": LONGROPE | {"attention_factor": 1.25},
}
PLACES = ("rope_scaling", "rope_parameters", "the old name of the type")


def write(path: Path, place: str, scaling: dict[str, Any], model: TinyModel | None = None, **fields: Any) -> Path:
    write_tiny_model(path, model)
    if place == "the old name of the type":
        place, scaling = "rope_scaling", {"type": scaling["rope_type"]} | scaling
        del scaling["rope_type"]
    config = json.loads((path / "config.json").read_text()) | {"rope_theta": 500.0} | fields
    (path / "config.json").write_text(json.dumps(config | {place: scaling}))
    return path


def transformers_logits(path: Path, chunks: list[int]) -> torch.Tensor:
    """With its own cache, prompts cut as given."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    past, logits, start = transformers.DynamicCache(config=model.config), [], 0
    with torch.inference_mode():
        for num_new in chunks:
            token_ids = torch.tensor([TOKENS[start : start + num_new]])
            logits.append(model(token_ids, cache=past, use_cache=True).logits[0])
            start += num_new
    return torch.cat(logits)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", SCALINGS)
def test_logits_are_those_of_transformers_however_the_prompt_is_cut(tmp_path: Path, name: str, place: str) -> None:
    path = write(tmp_path / "m", place, SCALINGS[name])
    expected = transformers_logits(path, [20])
    for chunks in ([20], [7, 13]):
        torch.testing.assert_close(forward_in_chunks(*load(path), chunks), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["yarn", "longrope", "llama3"])
def test_an_original_length_beside_the_parameters_wins(tmp_path: Path, kind: str) -> None:
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling = (SCALINGS | {"llama3": llama3 | {"original_max_position_embeddings": 64}})[kind]
    path = write(tmp_path / "m", "rope_scaling", scaling, original_max_position_embeddings=16)
    expected = transformers_logits(path, [20])
    torch.testing.assert_close(forward_in_chunks(*load(path), [7, 13]), expected, atol=1e-4, rtol=1e-4)
    inside = write(tmp_path / "n", "rope_scaling", scaling)
    assert not torch.allclose(forward_in_chunks(*load(inside), [20]), expected, atol=1e-2)


@pytest.mark.parametrize("name", SCALINGS)
def test_each_scaling_matters(tmp_path: Path, name: str) -> None:
    plain, scaled = (write(tmp_path / n, "rope_scaling", s) for n, s in {"a": {}, "b": SCALINGS[name]}.items())
    assert not torch.allclose(forward_in_chunks(*load(plain), [20]), forward_in_chunks(*load(scaled), [20]), atol=1e-2)


def test_dynamic_scaling_is_what_transformers_computes_token_by_token(tmp_path: Path) -> None:
    scaling = {"rope_type": "dynamic", "factor": 4.0}
    path = write(tmp_path / "m", "rope_scaling", scaling, TinyModel(max_position=ORIGINAL))
    expected = transformers_logits(path, [1] * 20)
    for chunks in ([20], [7, 13], [1] * 20):
        torch.testing.assert_close(forward_in_chunks(*load(path), chunks), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(transformers_logits(path, [ORIGINAL]), expected[:ORIGINAL], atol=1e-4, rtol=1e-4)
    assert open_checkpoint(path).config.max_position == 4 * ORIGINAL


def test_the_longest_text_that_is_served_decides_between_the_two_sets_of_longrope(tmp_path: Path) -> None:
    spec = open_checkpoint(write(tmp_path / "m", "rope_scaling", LONGROPE)).config
    short, long = (spec.for_length(length).rope_scaling for length in (ORIGINAL, ORIGINAL + 1))
    assert (short.divisors, long.divisors) == (tuple(LONGROPE["short_factor"]), tuple(LONGROPE["long_factor"]))
    assert short.amplitude == long.amplitude > 1


@pytest.mark.parametrize("kind", ["linear", "yarn", "longrope", "llama3"])
def test_a_gguf_file_gives_the_logits_of_its_directory(tmp_path: Path, kind: str) -> None:
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling = (SCALINGS | {"llama3": llama3 | {"original_max_position_embeddings": 64}})[kind]
    path = write(tmp_path / "m", "rope_scaling", scaling)
    converted = write_tiny_gguf(path, tmp_path / "m.gguf")
    torch.testing.assert_close(
        forward_in_chunks(*load(converted), [7, 13]), transformers_logits(path, [20]), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"rope_type": "xpos"}, "rope type 'xpos' is not supported, only linear, dynamic, llama3, yarn, longrope"),
        ({"rope_type": "linear"}, "factor should be a positive number, got None"),
        (YARN | {"factor": -1.0}, "factor should be a positive number, got -1.0"),
        (LONGROPE | {"long_factor": None}, "long_factor should be a list of positive numbers, got None"),
        (LONGROPE | {"short_factor": [1.0]}, "1 factors of RoPE do not fit the 8 pairs of a head"),
    ],
    ids=str,
)
def test_a_scaling_that_is_unknown_or_damaged_is_named(tmp_path: Path, scaling: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(write(tmp_path / "m", "rope_scaling", scaling))
