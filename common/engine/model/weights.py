"""Weights by Hugging Face name, read from safetensors or GGUF one tensor at a time."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

import gguf
import numpy as np
import torch

from common.checkpoint import Checkpoint, CheckpointError, ModelSpec
from common.checkpoint.families import family_of
from common.checkpoint.ggml_types import GGML_TYPES
from common.checkpoint.tensors import QuantizedTensor, StoredTensor
from common.engine.model.dequantize import dequantize as decode
from common.engine.model.sharding import Cut

# Reads a tensor, or no more of it than the cut.
Loader = Callable[[Cut | None], torch.Tensor]
# (kind, bytes, shape, dtype) -> a GGUF tensor's numbers; None for a format that it does not know
Dequantize = Callable[[str, np.ndarray, tuple[int, ...], torch.dtype], torch.Tensor | None]
PLAIN = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BLOCK_SIZES = {ggml.name: ggml.block_size for ggml in GGML_TYPES.values()}
NO_CUTS: Mapping[str, Cut] = MappingProxyType({})
CODES = {"F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8, "U8": torch.uint8, "I32": torch.int32, "I64": torch.int64}


class Weights:
    """Hands out each tensor, converted to `dtype` on `device`, and knows which were never asked for.

    `on_taken` is called with the share of the tensors that were handed out. Of a tensor among `cuts` only that is read.
    """

    def __init__(
        self,
        loaders: Mapping[str, Loader],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        on_taken: Callable[[float], None] | None = None,
        cuts: Mapping[str, Cut] = NO_CUTS,
    ) -> None:
        self._on_taken = on_taken
        self._cuts = cuts
        self._loaders = dict(loaders)
        self._left = set(self._loaders)
        self._dtype = dtype
        self._device = device

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Read one tensor, or its cut, as `dtype`, if given.

        Raises CheckpointError when it is missing or not of this shape."""
        if name not in self._loaders:
            raise CheckpointError(f"weight {name} is missing")
        tensor = self._loaders[name](self._cuts.get(name))
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"weight {name}: expected shape {shape}, got {tuple(tensor.shape)}")
        self._left.discard(name)
        if self._on_taken is not None:
            self._on_taken(1.0 - len(self._left) / len(self._loaders))
        return tensor.to(device=self._device, dtype=dtype or self._dtype)

    def check_all_taken(self) -> None:
        """A weight that was not asked for means that the forward pass is not this model's."""
        if self._left:
            raise CheckpointError(f"weights that the model does not use: {', '.join(sorted(self._left)[:5])}")


def open_weights(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    on_taken: Callable[[float], None] | None = None,
    dequantize: Dequantize | None = None,
    cuts: Mapping[str, Cut] = NO_CUTS,
) -> Weights:
    """The weights of a checkpoint. Nothing is read until it is taken. What `dequantize` does not know, the gguf
    library does."""
    return Weights(_loaders(checkpoint, dtype, dequantize), dtype, device, on_taken, cuts)


def load_tensors(
    checkpoint: Checkpoint, dtype: torch.dtype, dequantize: Dequantize | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor with its Hugging Face name."""
    for name, load in _loaders(checkpoint, dtype, dequantize).items():
        yield name, load(None).to(dtype)


def _loaders(checkpoint: Checkpoint, dtype: torch.dtype, dequantize: Dequantize | None) -> dict[str, Loader]:
    # copy on write, since torch takes no memory that it may not write to
    files = {path: np.memmap(path, mode="c", dtype=np.uint8) for path in _paths(checkpoint)}
    numbers = partial(_numbers, dequantize, dtype)
    exact = partial(_numbers, dequantize, torch.float32)
    if checkpoint.format == "gguf":
        return {
            name: partial(_read_gguf, files[each.path], each, _num_permuted_heads(name, checkpoint.config), numbers)
            for name, each in checkpoint.tensors.items()
            if isinstance(each, StoredTensor)
        }
    offset = family_of(checkpoint.config).hf_norm_offset
    return {
        name: partial(_decode, files, each)
        if isinstance(each, QuantizedTensor)
        else partial(
            _plus,
            files[each.path],
            each,
            exact if _is_exact(name) else numbers,
            offset if name.endswith("norm.weight") else 0.0,
        )
        for name, each in checkpoint.tensors.items()
    }


def _is_exact(name: str) -> bool:
    """What decides between scores that are near one another keeps its digits."""
    return name.endswith(("e_score_correction_bias.weight", "sinks.weight"))


def _decode(files: Mapping[Path, np.ndarray], tensor: QuantizedTensor, cut: Cut | None) -> torch.Tensor:
    """float32, the whole weight on its way: the codes of a cut need not stand together."""
    parts = {
        name: _plain(part, files[part.path][part.offset : part.offset + part.size_bytes])
        for name, part in tensor.parts.items()
    }
    numbers = decode(tensor, parts)
    return numbers if cut is None else numbers.narrow(cut.axis, cut.start, cut.size).clone()


def _plus(
    data: np.ndarray,
    tensor: StoredTensor,
    numbers: Callable[[StoredTensor, np.ndarray], torch.Tensor],
    offset: float,
    cut: Cut | None,
) -> torch.Tensor:
    """With an offset, the sum is of float32 numbers."""
    if not offset:
        return _read(data, tensor, numbers, cut)
    return _read(data, tensor, _plain, cut).float() + offset


def _paths(checkpoint: Checkpoint) -> set[Path]:
    tensors = checkpoint.tensors.values()
    stored = [
        part for each in tensors for part in (each.parts.values() if isinstance(each, QuantizedTensor) else (each,))
    ]
    return {tensor.path for tensor in stored}


def _num_permuted_heads(name: str, spec: ModelSpec) -> int:
    """The heads of a q or k whose rows a GGUF file of this family stores permuted; 0 = as they are."""
    if not family_of(spec).has_permuted_gguf:
        return 0
    return {"q_proj": spec.num_heads, "k_proj": spec.num_kv_heads}.get(name.split(".")[-2], 0)


def _read_gguf(
    data: np.ndarray,
    tensor: StoredTensor,
    num_permuted_heads: int,
    numbers: Callable[[StoredTensor, np.ndarray], torch.Tensor],
    cut: Cut | None,
) -> torch.Tensor:
    if cut is not None:
        num_permuted_heads = num_permuted_heads * cut.size // tensor.shape[0]
    rows = _read(data, tensor, numbers, cut)
    return _unpermute(rows, num_permuted_heads) if num_permuted_heads else rows


def _read(
    data: np.ndarray,
    tensor: StoredTensor,
    numbers: Callable[[StoredTensor, np.ndarray], torch.Tensor],
    cut: Cut | None,
) -> torch.Tensor:
    if cut is not None and cut.axis == 1:
        return _read_columns(data, tensor, numbers, cut)
    if cut is not None:
        tensor = _rows_of(tensor, cut)
    return numbers(tensor, data[tensor.offset : tensor.offset + tensor.size_bytes])


def _rows_of(tensor: StoredTensor, cut: Cut) -> StoredTensor:
    row_bytes = tensor.size_bytes // tensor.shape[0]
    offset, size_bytes = tensor.offset + cut.start * row_bytes, cut.size * row_bytes
    return replace(tensor, shape=(cut.size, *tensor.shape[1:]), offset=offset, size_bytes=size_bytes)


def _read_columns(
    data: np.ndarray, tensor: StoredTensor, numbers: Callable[[StoredTensor, np.ndarray], torch.Tensor], cut: Cut
) -> torch.Tensor:
    """The blocks of values that have any of them, then no more than those."""
    num_rows, width = tensor.shape
    block_size = _BLOCK_SIZES.get(tensor.kind, 1)
    block_bytes = tensor.size_bytes * block_size // (num_rows * width)
    first, last = cut.start // block_size, -(-cut.stop // block_size)
    raw = data[tensor.offset : tensor.offset + tensor.size_bytes].reshape(num_rows, -1)
    found = np.ascontiguousarray(raw[:, first * block_bytes : last * block_bytes]).reshape(-1)
    covering = replace(tensor, shape=(num_rows, (last - first) * block_size), size_bytes=found.nbytes)
    start = cut.start - first * block_size
    return numbers(covering, found)[:, start : start + cut.size].contiguous()


def _numbers(dequantize: Dequantize | None, dtype: torch.dtype, tensor: StoredTensor, raw: np.ndarray) -> torch.Tensor:
    """A new tensor, of `dtype` or of float32. `raw` may be written to."""
    if tensor.kind in PLAIN:
        return _plain(tensor, raw).to(dtype, copy=True)
    found = dequantize(tensor.kind, raw, tensor.shape, dtype) if dequantize is not None else None
    if found is not None:
        return found
    values = gguf.dequantize(raw.reshape(*tensor.shape[:-1], -1), gguf.GGMLQuantizationType[tensor.kind])
    return torch.from_numpy(np.require(values, requirements="W")).view(tensor.shape)


def _plain(tensor: StoredTensor, raw: np.ndarray) -> torch.Tensor:
    """The numbers where they lie in the file."""
    return torch.from_numpy(raw).view((PLAIN | CODES)[tensor.kind]).view(tensor.shape)


def _unpermute(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Interleaved pairs (0, 1), (2, 3).. of each head back to halves (0, d/2), (1, d/2 + 1).."""
    halves = rows.view(num_heads, -1, 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)
