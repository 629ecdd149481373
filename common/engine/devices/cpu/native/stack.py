"""Some layers of a decoder in one call, see `stack.h`. Owns the layout of what is passed to it."""

import ctypes
from collections.abc import Sequence

import torch

from common.engine.contract.attention import AttentionBatch, LayerKV
from common.engine.contract.device import ExpertMlp, Layer, Mlp, Tail
from common.engine.devices.cpu.native.experts import ExpertsStruct
from common.engine.devices.cpu.native.products import ProductStruct
from common.engine.devices.cpu.native.signature import function


class NativeStack:
    """Layers that follow one another and are alike, and final norm and head with `tail`. One step at a time."""

    def __init__(self, library: ctypes.CDLL, layers: Sequence[Layer], tail: Tail | None) -> None:
        """Every product of the layers and of the tail is packed; norms are bfloat16."""
        self._run = function(library, "pdserve_run_stack", "ppiib")
        experts = [_experts(layer) for layer in layers]
        self._owned = layers, tail, experts
        self._layers = (_Layer * len(layers))(*map(_layer, layers, experts))
        spec, cos_sin = layers[0].spec, layers[0].cos_sin
        sizes = len(layers), spec.hidden_size, spec.intermediate_size, spec.num_heads, spec.num_kv_heads, spec.head_dim
        ends = (tail.norm.data_ptr(), tail.head.packed.struct) if tail is not None else (None, ProductStruct())
        pointers = ctypes.addressof(self._layers), *sizes, cos_sin.data_ptr(), *ends
        self._decoder = _Decoder(*pointers, spec.norm_eps, spec.attention.scale)
        self._q_size = spec.q_size
        self.num_layers = len(layers)
        self.has_tail = tail is not None

    def start(
        self,
        hidden: torch.Tensor,  # [num_tokens, hidden_size] bfloat16, overwritten
        batch: AttentionBatch,
        kv: Sequence[LayerKV],  # per layer, bfloat16
        rows: torch.Tensor | None,  # [num_rows] int64, ascending: wanted past the last attention; None = all
    ) -> "StackStep":
        """A step that has yet to run."""
        assert hidden.is_contiguous(), "rows one after another"
        assert all(plane.is_contiguous() for planes in kv for plane in planes), "slots one after another"
        num_tokens = hidden.shape[0]
        rows = torch.arange(num_tokens) if rows is None else rows
        num_rows = rows.shape[0]
        logits = torch.empty((num_rows if self.has_tail else 0, self._decoder.head.num_out), dtype=torch.float32)
        wanted = hidden if num_rows == num_tokens else hidden.new_empty((num_rows, hidden.shape[1]))
        delta, queries = torch.empty_like(hidden), hidden.new_empty((num_tokens, self._q_size))
        caches = tuple((ctypes.c_void_p * len(kv))(*(planes[idx].data_ptr() for planes in kv)) for idx in range(2))
        tables = batch.block_tables
        step = _Step(
            batch.positions.data_ptr(), batch.slot_mapping.data_ptr(), batch.cu_seqlens_q.data_ptr(),
            batch.seq_lens.data_ptr(), tables.data_ptr(), tables.stride(0), tables.shape[0], num_tokens,
            kv[0][0].shape[1], *(ctypes.addressof(pointers) for pointers in caches), rows.data_ptr(), num_rows,
            hidden.data_ptr(), wanted.data_ptr(), delta.data_ptr(), queries.data_ptr(), logits.data_ptr(),
        )  # fmt: skip
        return StackStep(self, step, (wanted, delta, logits), (hidden, batch, kv, rows, caches, queries))

    def run(self, step: "_Step", first: int, last: int) -> None:
        self._run(ctypes.addressof(self._decoder), ctypes.addressof(step), first, last, torch.get_num_threads())


class StackStep:
    """One step on its way through the layers. Keeps alive what the compiled code points to."""

    def __init__(
        self,
        stack: NativeStack,
        step: "_Step",
        results: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        owned: tuple[object, ...],
    ) -> None:
        self._stack = stack
        self._step = step
        self._results = results
        self._owned = owned

    def run(self, first: int, last: int) -> None:
        """Half layers [first, last): 2 n is layer n up to its KV write, 2 n + 1 the rest; the last gives the result."""
        self._stack.run(self._step, first, last)

    def result(self) -> torch.Tensor:
        """After the last half: logits [num_rows, vocab_size] float32 of a stack with a tail, else its output."""
        hidden, delta, logits = self._results
        return logits if self._stack.has_tail else hidden.add_(delta[: hidden.shape[0]])


def _layer(layer: Layer, experts: ExpertsStruct | None) -> "_Layer":
    norms = (layer.norms.get(name) for name in ("before_attention", "before_mlp", "q_norm", "k_norm"))
    pointers = (norm.data_ptr() if norm is not None else None for norm in norms)
    attention = (layer.qkv.packed.struct, layer.output.packed.struct)
    if isinstance(layer.mlp, Mlp):
        return _Layer(*pointers, *attention, layer.mlp.gate_up.packed.struct, layer.mlp.down.packed.struct, None)
    assert experts is not None
    return _Layer(*pointers, *attention, ProductStruct(), ProductStruct(), ctypes.addressof(experts))


def _experts(layer: Layer) -> ExpertsStruct | None:
    return layer.mlp.experts.packed.with_router(layer.mlp) if isinstance(layer.mlp, ExpertMlp) else None


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("input_norm", "post_norm", "q_norm", "k_norm")),
        *((name, ProductStruct) for name in ("qkv", "output", "gate_up", "down")),
        ("experts", ctypes.c_void_p),
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
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("hidden", "wanted", "delta", "queries", "logits")),
    )
