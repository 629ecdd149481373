"""Where each tensor of a model lies in its files, and whether those are the tensors that the model needs. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.checkpoint.families import family_of, layers_of
from common.checkpoint.spec import CheckpointError, ModelSpec

# What exporters store though it can be derived.
DERIVED_SUFFIX = "rotary_emb.inv_freq"


# scaled: one number for each weight, [out, in]; packed: int32 of unsigned codes along the inputs, lowest bits first;
# awq and gptq: as those two pack them, with the weight transposed; mxfp4: uint8 [out, groups, 16] of two codes, the
# first in the low half, with the power of two of each group; transposed: numbers, [in, out].
Layout = Literal["scaled", "packed", "awq", "gptq", "mxfp4", "transposed"]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """`name` as the file has it; `shape` in row-major order; `kind` is a safetensors dtype or a ggml type.

    `offset` counts from the start of the file.
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    kind: str
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A weight [out_features, in_features] that is stored as codes with scales."""

    layout: Layout
    shape: tuple[int, ...]
    parts: Mapping[str, StoredTensor]  # codes, scale, and zeros and groups where there are such
    bits: int
    zero_offset: int = 0  # what is added to each zero point
    block: tuple[int, int] | None = None  # rows and columns that share a scale, where that is a square

    @property
    def path(self) -> Path:
        return self.parts["codes"].path

    @property
    def name(self) -> str:
        return self.parts["codes"].name


Tensor = StoredTensor | QuantizedTensor


def check_files_are_whole(tensors: Mapping[str, StoredTensor]) -> None:
    """Raises CheckpointError when a file ends before the last of its tensors does."""
    sizes = {path: path.stat().st_size for path in {tensor.path for tensor in tensors.values()}}
    for tensor in tensors.values():
        end, size_bytes = tensor.offset + tensor.size_bytes, sizes[tensor.path]
        if end > size_bytes:
            raise CheckpointError(
                f"{tensor.path} is cut off: {tensor.name} ends at byte {end}, the file at {size_bytes}; "
                "download it again"
            )


def check_tensors(path: Path, spec: ModelSpec, tensors: Mapping[str, Tensor]) -> None:
    """Raises CheckpointError that names a tensor which is missing, of another shape, or not this model's.

    `tensors` by Hugging Face name.
    """
    expected = expected_shapes(spec)
    for name, shape in expected.items():
        if name not in tensors:
            raise CheckpointError(f"{path}: weight {name} is missing")
        if tensors[name].shape != shape:
            found = tensors[name]
            raise CheckpointError(
                f"{found.path}: weight {found.name}: expected shape {shape}, as the configuration has it, "
                f"got {found.shape}"
            )
    unknown = sorted(set(tensors) - set(expected))
    if unknown:
        raise CheckpointError(f"{path}: weights that the model does not use: {', '.join(unknown[:5])}")


def expected_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The tensors of a model by Hugging Face name."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (spec.vocab_size, spec.hidden_size),
        "model.norm.weight": (spec.hidden_size,),
    }
    if not spec.tie_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, spec.hidden_size)
    names = family_of(spec).names
    for idx, layer in enumerate(layers_of(spec)):
        prefix = f"model.layers.{idx}"
        shapes |= {f"{prefix}.{names[part]}.weight": shape for part, shape in layer.weights.items()}
        num_experts = layer.experts.routing.num_experts if layer.experts is not None else 0
        for expert in range(num_experts):
            shapes |= {f"{prefix}.{names[p].format(expert)}.weight": s for p, s in layer.expert_weights.items()}
            if layer.experts is not None and layer.experts.has_biases:
                shapes |= {f"{prefix}.{names[p].format(expert)}.bias": s[:1] for p, s in layer.expert_weights.items()}
        shapes |= {f"{prefix}.{names[part]}.bias": layer.weights[part][:1] for part in layer.biases}
    return shapes
