"""Logits of small seeded models of each family are those of transformers, from a directory and from a GGUF file."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from common.checkpoint.hf_config import ARCHITECTURES
from tests.common.engine.model.test_architectures import TOKENS, forward_in_chunks, load
from tests.tiny_gguf import write_tiny_gguf
from tests.tiny_model import CLASSES, FAMILIES, TinyModel, write_tiny_model

transformers = pytest.importorskip("transformers")

CHUNKS = ([20], [7, 13], [8, 1, 1, 10])
MODELS = FAMILIES | {
    "qwen3 of another shape": TinyModel(architecture="qwen3", num_heads=6, num_kv_heads=2, head_dim=24),
    "llama with biases": TinyModel(has_biases=True),
    "qwen3 with biases": TinyModel(architecture="qwen3", has_biases=True),
}
OLD, NEW = ("sliding_window_pattern", "rope_local_base_freq", "rope_theta"), "rope_parameters"
# Gemma 3 as transformers 4 and as transformers 5 write it.
GEMMA3: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "as older files have it": ((), {}),
    "layer types": (OLD[:1], {"layer_types": ["sliding_attention", "full_attention"] * 2}),
    "two sets of RoPE parameters": (
        OLD,
        {
            NEW: {
                "full_attention": {"rope_type": "default", "rope_theta": 77.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 33.0},
            }
        },
    ),
    "one set of two": (OLD[1:], {NEW: {"full_attention": {"rope_type": "default", "rope_theta": 77.0}}}),
    "everything absent": ((*OLD, "tie_word_embeddings", "hidden_activation"), {}),
}


def transformers_logits(path: Path) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        return model(torch.tensor([TOKENS])).logits[0]


def test_each_class_that_is_read_has_a_tiny_model() -> None:
    assert {f"{name}ForCausalLM" for name in CLASSES.values()} == set(ARCHITECTURES)


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers_however_the_prompt_is_cut(tmp_path: Path, name: str) -> None:
    path = write_tiny_model(tmp_path / "m", MODELS[name])
    expected = transformers_logits(path)
    for chunks in CHUNKS:
        torch.testing.assert_close(forward_in_chunks(*load(path), chunks), expected, atol=1e-4, rtol=1e-4)


PHI3: dict[str, dict[str, Any]] = {
    "a part of each head turns": {"partial_rotary_factor": 0.5},
    "longrope": {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [3.0] * 8}},
    "longrope by its older name, of a part": {
        "rope_scaling": {"type": "su", "short_factor": [1.0] * 6, "long_factor": [3.0, 2.0, 9.0, 1.0, 2.0, 5.0]}
        | {"original_max_position_embeddings": 16},
        "partial_rotary_factor": 0.75,
    },
}


@pytest.mark.parametrize("name", PHI3)
def test_phi3_means_what_transformers_makes_of_it(tmp_path: Path, name: str) -> None:
    path = write_tiny_model(tmp_path / "m", FAMILIES["phi3"])
    fields = {"original_max_position_embeddings": 16} | PHI3[name]
    config = json.loads((path / "config.json").read_text()) | fields
    (path / "config.json").write_text(json.dumps(config))
    expected = transformers_logits(path)
    torch.testing.assert_close(forward_in_chunks(*load(path), [7, 13]), expected, atol=1e-4, rtol=1e-4)
    scaling = config.get("rope_scaling")
    if scaling is not None:
        scaling = scaling | {"rope_type": "longrope", "original_max_position_embeddings": 16}
    (path / "config.json").write_text(json.dumps(config | {"rope_scaling": scaling}))
    converted = write_tiny_gguf(path, tmp_path / "m.gguf")
    torch.testing.assert_close(forward_in_chunks(*load(converted), [20]), expected, atol=1e-4, rtol=1e-4)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
# As config.json may have it besides: the change, and of which family.
DEEPSEEK: dict[str, tuple[str, dict[str, Any]]] = {
    "the best experts of all": ("deepseek_v2", {"topk_method": "greedy"}),
    "no topk_method": ("deepseek_v2", {"topk_method": "greedy", "n_group": None, "topk_group": None}),
    "a scale of its own": ("deepseek_v2", {"routed_scaling_factor": 0.5}),
    "plain RoPE": ("deepseek_v3", {"rope_scaling": None}),
    "pairs half a head apart": ("deepseek_v3", {"rope_interleave": False}),
    "a dense layer": ("deepseek_v2", {}),
    "experts in every layer": ("deepseek_v3", {}),
    "weights of experts as they are": ("deepseek_v3", {"norm_topk_prob": False}),
    "RoPE as transformers 5 writes it": (
        "deepseek_v3",
        {"rope_scaling": None, "rope_parameters": YARN | {"rope_theta": 5000.0, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "no magnitude": ("deepseek_v3", {"rope_scaling": YARN}),
}


@pytest.mark.parametrize("name", DEEPSEEK)
def test_deepseek_means_what_transformers_makes_of_it(tmp_path: Path, name: str) -> None:
    family, changes = DEEPSEEK[name]
    path = write_tiny_model(tmp_path / "m", replace(FAMILIES[family], num_dense_layers=name.count("dense")))
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(config))
    torch.testing.assert_close(forward_in_chunks(*load(path), [7, 13]), transformers_logits(path), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", GEMMA3)
def test_gemma3_means_what_transformers_makes_of_it(tmp_path: Path, name: str) -> None:
    path = write_tiny_model(tmp_path / "m", FAMILIES["gemma3"])
    drop, changes = GEMMA3[name]
    fields = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({each: fields[each] for each in fields if each not in drop}))
    torch.testing.assert_close(forward_in_chunks(*load(path), [7, 13]), transformers_logits(path), atol=1e-4, rtol=1e-4)


def test_gemma3_from_a_gguf_file_gives_the_logits_of_its_directory(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m", FAMILIES["gemma3"])
    config = json.loads((path / "config.json").read_text()) | {"query_pre_attn_scalar": 16}
    (path / "config.json").write_text(json.dumps(config))
    converted = write_tiny_gguf(path, tmp_path / "m.gguf")
    torch.testing.assert_close(
        forward_in_chunks(*load(converted), [7, 13]), transformers_logits(path), atol=1e-4, rtol=1e-4
    )
