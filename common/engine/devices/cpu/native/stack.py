"""A whole step of a decoder in one call, see `stack.h`. Owns the layout of what is passed to it."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.engine.contract.attention import AttentionBatch
from common.engine.devices.cpu.native.products import PackedProduct, ProductStruct
from common.engine.devices.cpu.native.signature import function


@dataclass(frozen=True, slots=True)
class StackLayer:
    """One layer's weights, norms bfloat16 on the CPU."""

    input_norm: torch.Tensor  # [hidden_size]
    post_norm: torch.Tensor
    q_norm: torch.Tensor | None  # [head_dim]
    k_norm: torch.Tensor | None
    qkv: PackedProduct
    output: PackedProduct
    gate_up: PackedProduct
    down: PackedProduct


@dataclass(frozen=True, slots=True)
class StackShape:
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    scale: float


class NativeStack:
    """Layers, final norm and head. Immutable; one step at a time."""

    def __init__(
        self,
        library: ctypes.CDLL,
        shape: StackShape,
        layers: Sequence[StackLayer],
        norm: torch.Tensor,
        head: PackedProduct,
        cos_sin: torch.Tensor,  # [max_position, head_dim] float32
    ) -> None:
        self._run = function(library, "pdserve_run_stack", "ppiib")
        self._shape = shape
        self._owned = layers, norm, head, cos_sin
        self._layers = (_Layer * len(layers))(*(_layer(layer) for layer in layers))
        sizes = len(layers), shape.hidden_size, shape.intermediate_size
        heads = shape.num_heads, shape.num_kv_heads, shape.head_dim
        pointers = ctypes.addressof(self._layers), *sizes, *heads, cos_sin.data_ptr(), norm.data_ptr()
        self._decoder = _Decoder(*pointers, head.struct, shape.eps, shape.scale)

    def start(
        self,
        hidden: torch.Tensor,  # [num_tokens, hidden_size] bfloat16, overwritten
        batch: AttentionBatch,
        kv: Sequence[torch.Tensor],  # per layer [2, num_blocks, block_size, num_kv_heads, head_dim] bfloat16
        logit_rows: torch.Tensor,  # [num_rows] int64, ascending
    ) -> "StackStep":
        """A step that has yet to run."""
        shape = self._shape
        assert hidden.is_contiguous(), "rows one after another"
        assert all(layer.stride()[1:] == kv[0].stride()[1:] for layer in kv), "layers of one cache"
        num_tokens, num_rows = hidden.shape[0], logit_rows.shape[0]
        logits = torch.empty((num_rows, self._decoder.head.num_out), dtype=torch.float32)
        carried = torch.empty_like(hidden), hidden.new_empty((num_tokens, shape.num_heads * shape.head_dim))
        caches = (ctypes.c_void_p * len(kv))(*(layer.data_ptr() for layer in kv))
        tables = batch.block_tables
        step = _Step(
            batch.positions.data_ptr(), batch.slot_mapping.data_ptr(), batch.cu_seqlens_q.data_ptr(),
            batch.seq_lens.data_ptr(), tables.data_ptr(), tables.stride(0), tables.shape[0], num_tokens, kv[0].shape[2],
            ctypes.addressof(caches), kv[0].stride(0), logit_rows.data_ptr(), num_rows, hidden.data_ptr(),
            carried[0].data_ptr(), carried[1].data_ptr(), logits.data_ptr(),
        )  # fmt: skip
        return StackStep(self, step, logits, (hidden, batch, kv, logit_rows, caches, carried))

    def run(self, step: "_Step", first: int, last: int) -> None:
        self._run(ctypes.addressof(self._decoder), ctypes.addressof(step), first, last, torch.get_num_threads())


class StackStep:
    """One step on its way through the layers. Keeps alive what the compiled code points to."""

    def __init__(self, stack: NativeStack, step: "_Step", logits: torch.Tensor, owned: tuple[object, ...]) -> None:
        self._stack = stack
        self._step = step
        self._owned = owned
        self.logits = logits  # [num_rows, vocab_size] float32; valid after the last half

    def run(self, first: int, last: int) -> None:
        """Half layers [first, last): 2 n is layer n up to its KV write, 2 n + 1 the rest; the last gives the logits."""
        self._stack.run(self._step, first, last)


def _layer(layer: StackLayer) -> "_Layer":
    norms = (layer.input_norm, layer.post_norm, layer.q_norm, layer.k_norm)
    pointers = (norm.data_ptr() if norm is not None else None for norm in norms)
    return _Layer(*pointers, layer.qkv.struct, layer.output.struct, layer.gate_up.struct, layer.down.struct)


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("input_norm", "post_norm", "q_norm", "k_norm")),
        *((name, ProductStruct) for name in ("qkv", "output", "gate_up", "down")),
    )


_SIZES = ("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")


class _Decoder(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in _SIZES),
        ("cos_sin", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
        ("head", ProductStruct),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("positions", "slots", "cu_seqlens", "seq_lens", "block_tables")),
        *((name, ctypes.c_int64) for name in ("table_stride", "num_seqs", "num_tokens", "block_size")),
        ("kv", ctypes.c_void_p),
        ("kv_stride", ctypes.c_int64),
        ("logit_rows", ctypes.c_void_p),
        ("num_logit_rows", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("hidden", "delta", "queries", "logits")),
    )
