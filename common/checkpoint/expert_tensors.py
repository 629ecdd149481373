"""Tensors that hold all experts of a layer, found as one tensor for each expert. No IO.

transformers 5 and GGUF stack the experts' weights; a slice of a stack lies in one piece in the file.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

from common.checkpoint.families import family_of, layers_of
from common.checkpoint.layers import LayerSpec
from common.checkpoint.spec import CheckpointError, ModelSpec
from common.checkpoint.tensors import StoredTensor, Tensor

# Name under `model.layers.N` -> the parts of one expert that follow one another in it, [num_experts, rows, inputs].
STACKS = {
    "mlp.experts.gate_up_proj": ("expert_gate", "expert_up"),
    "mlp.experts.down_proj": ("expert_down",),
    "ffn_gate_exps.weight": ("expert_gate",),
    "ffn_up_exps.weight": ("expert_up",),
    "ffn_gate_up_exps.weight": ("expert_gate", "expert_up"),
    "ffn_down_exps.weight": ("expert_down",),
}
PACKED_ROUTER = "mlp.gate.weight"  # so called beside stacks, whatever the family calls it


def unstack_experts(spec: ModelSpec, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`tensors` with each stack replaced by its slices, by the family's names. Raises CheckpointError by name."""
    found, names = dict(tensors), family_of(spec).names
    for idx, layer in enumerate(layers_of(spec)):
        if layer.experts is None:
            continue
        prefix = f"model.layers.{idx}"
        stacks = {stem: found.pop(f"{prefix}.{stem}") for stem in STACKS if f"{prefix}.{stem}" in found}
        if any(stem.startswith("mlp.") for stem in stacks) and f"{prefix}.{PACKED_ROUTER}" in found:
            found[f"{prefix}.{names['router']}.weight"] = found.pop(f"{prefix}.{PACKED_ROUTER}")
        for stem, stack in stacks.items():
            assert isinstance(stack, StoredTensor), stack.name  # codes have other names
            found |= _slices(f"{prefix}.", names, layer, stack, STACKS[stem])
    return found


def _slices(
    prefix: str, names: Mapping[str, str], layer: LayerSpec, stack: StoredTensor, parts: tuple[str, ...]
) -> dict[str, StoredTensor]:
    assert layer.experts is not None
    shapes = [layer.expert_weights[part] for part in parts]
    num_experts, num_rows = layer.experts.routing.num_experts, sum(shape[0] for shape in shapes)
    expected = (num_experts, num_rows, shapes[0][1])
    if stack.shape != expected:
        raise CheckpointError(
            f"{stack.path}: weight {stack.name}: expected shape {expected}, as the configuration has it, "
            f"got {stack.shape}"
        )
    row_bytes = stack.size_bytes // math.prod(expected[:2])
    slices, row = {}, 0
    for expert in range(num_experts):
        for part, shape in zip(parts, shapes, strict=True):
            offset, size_bytes = stack.offset + row * row_bytes, shape[0] * row_bytes
            name = f"{prefix}{names[part].format(expert)}.weight"
            slices[name] = replace(stack, shape=shape, offset=offset, size_bytes=size_bytes)
            row += shape[0]
    return slices
