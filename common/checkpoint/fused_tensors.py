"""Tensors that hold several weights, found as one tensor for each weight. No IO.

transformers 5 and GGUF stack the weights of a layer's experts, and some families fuse projections of one input; a run
of rows lies in one piece in the file.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

from common.checkpoint.families import FUSED_PARTS, family_of, layers_of
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
BARE_PARTS = ("sinks", "choice_bias")
PACKED_ROUTER = "mlp.gate.weight"  # so called beside stacks, whatever the family calls it


def named_like_weights(spec: ModelSpec, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """`tensors` with the ending of a weight where a file has none, and without those of layers that only draft."""
    names, found = family_of(spec).names, {}
    bare = tuple(f".{names[part]}" for part in BARE_PARTS if part in names)
    drafting = tuple(f"model.layers.{spec.num_layers + idx}." for idx in range(spec.num_drafting_layers))
    for name, tensor in tensors.items():
        if not drafting or not name.startswith(drafting):
            found[f"{name}.weight" if bare and name.endswith(bare) else name] = tensor
    return found


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
            found |= _slices(f"{prefix}.", names, layer, stack, STACKS[stem])
    return found


def split_fused(spec: ModelSpec, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`tensors` with each fused one replaced by its parts, by the family's names. Raises CheckpointError by name."""
    found, names = dict(tensors), family_of(spec).names
    for idx, layer in enumerate(layers_of(spec)):
        for fused, parts in FUSED_PARTS.items():
            name = f"model.layers.{idx}.{names.get(fused)}.weight"
            if name in found:
                shapes = {f"model.layers.{idx}.{names[part]}.weight": layer.weights[part] for part in parts}
                found |= _rows(found.pop(name), (), shapes)
    return found


def _slices(
    prefix: str, names: Mapping[str, str], layer: LayerSpec, stack: Tensor, parts: tuple[str, ...]
) -> dict[str, StoredTensor]:
    assert layer.experts is not None
    num_experts = layer.experts.routing.num_experts
    shapes = {
        f"{prefix}{names[part].format(expert)}.weight": layer.expert_weights[part]
        for expert in range(num_experts)
        for part in parts
    }
    return _rows(stack, (num_experts,), shapes)


def _rows(tensor: Tensor, leading: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, StoredTensor]:
    """`shapes` of the weights that follow one another in `tensor`, whose axes before the rows are `leading`."""
    if not isinstance(tensor, StoredTensor):
        raise CheckpointError(f"{tensor.path}: {tensor.name} holds several weights as codes, which is not supported")
    num_rows = sum(shape[0] for shape in shapes.values())
    expected = (*leading, num_rows // math.prod(leading), next(iter(shapes.values()))[1])
    if tensor.shape != expected:
        raise CheckpointError(
            f"{tensor.path}: weight {tensor.name}: expected shape {expected}, as the configuration has it, "
            f"got {tensor.shape}"
        )
    row_bytes, row = tensor.size_bytes // num_rows, 0
    found = {}
    for name, shape in shapes.items():
        offset, size_bytes = tensor.offset + row * row_bytes, shape[0] * row_bytes
        found[name] = replace(tensor, shape=shape, offset=offset, size_bytes=size_bytes)
        row += shape[0]
    return found
