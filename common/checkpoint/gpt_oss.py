"""gpt-oss: what its config.json states besides, and its experts, all of a layer in few tensors. No IO.

An expert's gate and up are interleaved rows of one weight. Weights are MXFP4 codes with a scale for each 32 inputs, or
numbers with inputs and outputs exchanged.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from common.checkpoint.families import family_of, layers_of
from common.checkpoint.layers import CLAMP, CLAMPED_SLOPE, Experts, Routing
from common.checkpoint.spec import CheckpointError, ModelSpec
from common.checkpoint.tensors import QuantizedTensor, StoredTensor, Tensor

MXFP4_GROUP, MXFP4_BYTES = 32, 16  # inputs that share a scale, and the bytes of their codes
PARTS = {"gate_up_proj": "expert_gate_up", "down_proj": "expert_down"}


def gpt_oss_experts(config: Mapping[str, Any], routing: Routing, size: int) -> Experts:
    """Raises CheckpointError by field."""
    for name, known in (("swiglu_alpha", CLAMPED_SLOPE), ("swiglu_limit", CLAMP)):
        if config.get(name, known) != known:
            raise CheckpointError(f"config.json: {name}={config[name]!r} is not supported, only {known}")
    return Experts(routing, size, is_interleaved=True, has_biases=True)


def find_gpt_oss(spec: ModelSpec, tensors: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
    """One tensor for each weight and bias of an expert, by our names. Raises CheckpointError by name."""
    found: dict[str, Tensor] = dict(tensors)
    names = family_of(spec).names
    for idx, layer in enumerate(layers_of(spec)):
        prefix = f"model.layers.{idx}"
        assert layer.experts is not None
        for stem, part in PARTS.items():
            shape = layer.expert_weights[part]
            target = f"{prefix}.{names[part]}"
            found |= _experts(f"{prefix}.mlp.experts.{stem}", target, layer.experts.routing.num_experts, shape, found)
    return found


def _experts(
    stem: str, target: str, num_experts: int, shape: tuple[int, ...], found: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Takes what it uses out of `found`. `target` has the place of the expert's number."""

    def stack(name: str, *of_expert: int) -> list[StoredTensor]:
        tensor = found.pop(name, None)
        if not isinstance(tensor, StoredTensor):
            raise CheckpointError(f"weight {name} is missing")
        if tensor.shape != (num_experts, *of_expert):
            expected = (num_experts, *of_expert)
            raise CheckpointError(f"{tensor.path}: weight {name}: expected shape {expected}, got {tensor.shape}")
        size = tensor.size_bytes // num_experts
        offsets = (tensor.offset + expert * size for expert in range(num_experts))
        return [replace(tensor, shape=of_expert, offset=offset, size_bytes=size) for offset in offsets]

    num_out, num_in = shape
    if f"{stem}_blocks" in found:
        codes = stack(f"{stem}_blocks", num_out, num_in // MXFP4_GROUP, MXFP4_BYTES)
        scales = stack(f"{stem}_scales", num_out, num_in // MXFP4_GROUP)
        weights = [
            QuantizedTensor("mxfp4", shape, {"codes": code, "scale": scale}, 4)
            for code, scale in zip(codes, scales, strict=True)
        ]
    else:
        weights = [QuantizedTensor("transposed", shape, {"codes": one}, 0) for one in stack(stem, num_in, num_out)]
    biases = stack(f"{stem}_bias", num_out)
    named: dict[str, Tensor] = {f"{target.format(expert)}.weight": one for expert, one in enumerate(weights)}
    return named | {f"{target.format(expert)}.bias": one for expert, one in enumerate(biases)}
