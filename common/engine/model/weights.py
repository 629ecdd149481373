"""Weights by Hugging Face name, read from safetensors or GGUF one tensor at a time."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors import safe_open

from common.checkpoint import Checkpoint, CheckpointError, ModelSpec
from common.checkpoint.gguf_metadata import GgufTensor, read_gguf_header
from common.checkpoint.hf_checkpoint import weight_files

Loader = Callable[[], torch.Tensor]

GGUF_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GGUF_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


class Weights:
    """Hands out each tensor, converted to `dtype` on `device`, and knows which were never asked for.

    `on_taken` hears the share of the tensors that were handed out.
    """

    def __init__(
        self,
        loaders: Mapping[str, Loader],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        on_taken: Callable[[float], None] | None = None,
    ) -> None:
        self._on_taken = on_taken
        self._loaders = dict(loaders)
        self._left = set(self._loaders)
        self._dtype = dtype
        self._device = device

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Read one tensor. Raises CheckpointError when it is missing or of another shape."""
        if name not in self._loaders:
            raise CheckpointError(f"weight {name} is missing")
        tensor = self._loaders[name]()
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"weight {name}: expected shape {shape}, got {tuple(tensor.shape)}")
        self._left.discard(name)
        if self._on_taken is not None:
            self._on_taken(1.0 - len(self._left) / len(self._loaders))
        return tensor.to(device=self._device, dtype=self._dtype)

    def check_all_taken(self) -> None:
        """A weight that nobody asked for means that the forward pass is not this model's."""
        if self._left:
            raise CheckpointError(f"weights that the model does not use: {', '.join(sorted(self._left)[:5])}")


def open_weights(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    on_taken: Callable[[float], None] | None = None,
) -> Weights:
    """The weights of a checkpoint. Nothing is read until it is taken."""
    return Weights(_loaders(checkpoint), dtype, device, on_taken)


def load_tensors(checkpoint: Checkpoint, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor with its Hugging Face name."""
    for name, load in _loaders(checkpoint).items():
        yield name, load().to(dtype)


def _loaders(checkpoint: Checkpoint) -> dict[str, Loader]:
    loaders = _gguf_loaders(checkpoint) if checkpoint.format == "gguf" else _safetensors_loaders(checkpoint.path)
    # Some exporters store what can be derived: the tied head, and RoPE frequencies.
    derived = {"lm_head.weight"} if checkpoint.config.tie_embeddings else set()
    return {n: load for n, load in loaders.items() if n not in derived and not n.endswith("rotary_emb.inv_freq")}


def _safetensors_loaders(path: Path) -> dict[str, Loader]:
    loaders: dict[str, Loader] = {}
    for file in weight_files(path):
        reader = safe_open(str(file), framework="pt")
        names: list[str] = reader.keys()  # type: ignore[no-untyped-call]
        loaders |= {name: partial(reader.get_tensor, name) for name in names}
    return loaders


def _gguf_loaders(checkpoint: Checkpoint) -> dict[str, Loader]:
    data = np.memmap(checkpoint.path, mode="r", dtype=np.uint8)
    tensors = read_gguf_header(checkpoint.path).tensors
    loaders: dict[str, Loader] = {}
    for tensor in tensors.values():
        name = _huggingface_name(tensor.name)
        num_heads = _num_permuted_heads(name, checkpoint.config)
        loaders[name] = partial(_dequantize, data, tensor, num_heads)
    return loaders


def _huggingface_name(gguf_name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight"""
    stem, _, kind = gguf_name.rpartition(".")
    if stem.startswith("blk."):
        _, layer, part = stem.split(".", 2)
        return f"model.layers.{layer}.{GGUF_LAYER_NAMES.get(part, part)}.{kind}"
    return f"{GGUF_NAMES.get(stem, stem)}.{kind}"


def _num_permuted_heads(name: str, spec: ModelSpec) -> int:
    """GGUF stores q and k of the llama family with rows permuted for interleaved RoPE; other families not at all."""
    if spec.architecture != "llama":
        return 0
    return {"q_proj": spec.num_heads, "k_proj": spec.num_kv_heads}.get(name.split(".")[-2], 0)


def _dequantize(data: np.ndarray, tensor: GgufTensor, num_permuted_heads: int) -> torch.Tensor:
    quant_type = gguf.GGMLQuantizationType(tensor.type_id)
    block_size, type_size = gguf.GGML_QUANT_SIZES[quant_type]
    *rows, row_len = tensor.shape
    row_bytes = row_len // block_size * type_size
    raw = data[tensor.offset : tensor.offset + int(np.prod(rows, dtype=np.int64)) * row_bytes]
    # Unquantized types come back as a view of the file, which torch may not write to.
    values = np.require(gguf.dequantize(raw.reshape(*rows, row_bytes), quant_type), requirements="W")
    rows_of_weight = torch.from_numpy(values).view(tensor.shape)
    return _unpermute(rows_of_weight, num_permuted_heads) if num_permuted_heads else rows_of_weight


def _unpermute(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Interleaved pairs (0, 1), (2, 3).. of each head back to halves (0, d/2), (1, d/2 + 1).."""
    halves = rows.view(num_heads, -1, 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)
