"""Latent attention: what a token takes in the cache, and what is refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch

from common.checkpoint import CheckpointError, ModelSpec
from common.checkpoint.hf_config import parse_config
from common.engine.loading import kv_spec_of, load_model
from common.values.config import ModelConfig, WorkerConfig
from common.values.request import SamplingParams
from tests.common.engine.drive import Generation, blocks_for, run_all
from tests.interpreter import import_triton_interpreted
from tests.tiny_model import FAMILIES, write_tiny_model

import_triton_interpreted()

from tests.common.engine.test_greedy_like_transformers import PROMPT, load  # noqa: E402

# config.json of DeepSeek-V3 as far as it differs from what transformers takes for absent fields.
V3: dict[str, Any] = {
    **{"architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 7168, "num_hidden_layers": 61},
    **{"num_attention_heads": 128, "intermediate_size": 18432, "vocab_size": 129280},
    "max_position_embeddings": 163840,
}


def bytes_per_token(spec: ModelSpec) -> int:
    return kv_spec_of(spec, torch.bfloat16, 16).bytes_per_token


def test_a_model_of_the_size_of_v3_takes_70_kb_a_token_where_keys_and_values_take_1_7_mb() -> None:
    plain = V3 | {"architectures": ["LlamaForCausalLM"]}
    assert bytes_per_token(parse_config(V3)) == 61 * (512 + 64) * 2 == 70_272
    assert bytes_per_token(parse_config(plain)) == 61 * 2 * 7168 * 2 == 1_748_992


def test_the_latent_is_the_only_plane(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m", FAMILIES["deepseek_v2"])
    config = WorkerConfig(role="prefill", worker_id="p", model=ModelConfig(path=str(path)), num_blocks=2)
    loaded = load_model(config)
    (group,) = loaded.cache.spec.groups
    assert [(plane.name, plane.shape) for plane in group.planes] == [("latent", (40,))]
    assert ("kv_cache", "layers 0-1: latent 40 float32") in loaded.fingerprint.fields


def test_triton_gives_the_tokens_and_logprobs_of_the_cpu(tmp_path: Path) -> None:
    """Chunks of 7 of one prompt beside the single tokens of another, then both decode."""
    path = write_tiny_model(tmp_path / "m", FAMILIES["deepseek_v3"])
    params = SamplingParams(seed=1, max_tokens=3, temperature=0.0, num_logprobs=1)
    answers = []
    for attention in ("cpu", "triton"):
        loaded = load(path, attention=attention)
        tables = blocks_for([32, 32], loaded.cache.block_size, 64)
        prompts = PROMPT[:6], PROMPT
        generations = [Generation(list(prompt), params, table) for prompt, table in zip(prompts, tables, strict=True)]
        run_all(loaded.runner, generations, 7)
        answers.append([token for generation in generations for token in generation.tokens])
    cpu, triton = answers
    assert [token.token_id for token in cpu] == [token.token_id for token in triton]
    logprobs = [torch.tensor([token.logprob for token in tokens]) for tokens in answers]
    torch.testing.assert_close(*logprobs, atol=1e-3, rtol=0)


def test_latents_are_not_stored_as_codes(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m", FAMILIES["deepseek_v2"])
    fields = {"num_blocks": 2, "kv_cache_dtype": "int8"}
    config = WorkerConfig(role="prefill", worker_id="p", model=ModelConfig(path=str(path)), **fields)
    with pytest.raises(CheckpointError, match="kv_cache_dtype should be auto"):
        load_model(config)


@pytest.mark.parametrize(
    "change",
    [
        {"scoring_func": "softmax"},
        {"topk_method": "greedy"},
        {"moe_layer_freq": 2},
        {"attention_bias": True},
        {"kv_lora_rank": None},
        {"q_lora_rank": -1},
        {"qk_rope_head_dim": 7},
        {"n_group": 7},
        {"num_experts_per_tok": 200},
        {"rope_scaling": {"type": "yarn", "factor": "4", "mscale_all_dim": 1.0}},
    ],
    ids=str,
)
def test_what_is_not_computed_as_transformers_does_is_refused_by_name(change: dict[str, Any]) -> None:
    name = {"rope_scaling": "factor", "qk_rope_head_dim": "even for RoPE"}
    with pytest.raises(CheckpointError, match=name.get(next(iter(change)), next(iter(change)))):
        parse_config(V3 | change)


def test_v2_does_not_divide_the_weights_of_experts_by_their_sum() -> None:
    v2 = V3 | {"architectures": ["DeepseekV2ForCausalLM"], "num_experts_per_tok": 6}
    routing = parse_config(v2).experts.routing  # type: ignore[union-attr]
    assert (routing.scores, routing.is_normalized, routing.num_groups) == ("softmax", False, 1)
    with pytest.raises(CheckpointError, match="norm_topk_prob=True is not supported"):
        parse_config(v2 | {"norm_topk_prob": True})
