"""The oracle for disaggregated output: one process, one sequence at a time, no blocks, no batch, no handoff.

Forward passes are `tests.reference_model`'s; only the sampler is shared with the product.
"""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch

from common.checkpoint import open_checkpoint
from common.engine.contract.plan import SampleSpec
from common.engine.model.weights import load_tensors
from common.engine.sampling import sample
from common.guided.masks import Masks, guided_tokenizer
from common.values.request import SampledToken, SamplingParams
from tests.reference_model import ReferenceModel


def generate(
    model_path: Path | str,
    token_ids: Sequence[int],
    params: SamplingParams,
    choices: Sequence[int] = (0,),
    dtype: str = "float32",
) -> list[list[int]]:
    """The output token ids of each choice, ending as `params` say. `dtype` is that of the stored weights."""
    tokens = generate_tokens(model_path, token_ids, params, choices, dtype)
    return [[token.token_id for token in choice] for choice in tokens]


def generate_tokens(
    model_path: Path | str,
    token_ids: Sequence[int],
    params: SamplingParams,
    choices: Sequence[int] = (0,),
    dtype: str = "float32",
) -> list[list[SampledToken]]:
    """The same with logprobs."""
    model, masks = _load(str(model_path), dtype), _masks(str(model_path)) if params.grammar else None
    return [_generate_choice(model, tuple(token_ids), params, choice_idx, masks) for choice_idx in choices]


def _generate_choice(
    model: ReferenceModel, prompt: tuple[int, ...], params: SamplingParams, choice_idx: int, masks: Masks | None
) -> list[SampledToken]:
    past = model.new_past()
    output: list[SampledToken] = []
    new_tokens = list(prompt)
    while True:
        logits = model.forward(new_tokens, past)[-1:]
        token_ids = prompt + tuple(token.token_id for token in output)
        banned = _banned(params, [token.token_id for token in output])
        spec = SampleSpec(choice_idx, len(output), params, len(prompt), token_ids, banned)
        allowed = {} if masks is None else {0: masks.allowed(params.grammar, token_ids[len(prompt) :])}
        (token,) = sample(logits, [spec], None, allowed)
        assert isinstance(token, SampledToken), token
        output.append(token)
        if params.finish_reason(token.token_id, len(output)) is not None:
            return output
        new_tokens = [token.token_id]


def _banned(params: SamplingParams, output: list[int]) -> tuple[int, ...]:
    """Whatever would end the output too soon, or complete a bad word at its end."""
    too_soon = params.stop_token_ids if len(output) < params.min_tokens else ()
    spelled = [word[-1] for word in params.bad_words if (*output, word[-1])[-len(word) :] == word]
    return (*too_soon, *spelled)


@lru_cache(maxsize=4)
def _masks(model_path: str) -> Masks:
    checkpoint = open_checkpoint(model_path)
    return Masks(guided_tokenizer(checkpoint.tokenizer(), checkpoint.config.vocab_size, checkpoint.eos_token_ids))


@lru_cache(maxsize=4)
def _load(model_path: str, dtype: str) -> ReferenceModel:
    checkpoint = open_checkpoint(model_path)
    spec = checkpoint.config
    config = {
        "model_type": spec.architecture,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_theta": spec.rope_theta,
        "tie_word_embeddings": spec.tie_embeddings,
    }
    if spec.experts is not None:
        routing = spec.experts.routing
        config |= {"num_experts_per_tok": routing.num_active, "norm_topk_prob": routing.is_normalized}
    assert spec.rope_scaling is None, "the oracle has no use for scaled RoPE yet"
    return ReferenceModel(config, dict(load_tensors(checkpoint, getattr(torch, dtype))))
