"""The compiled operators with tensors in front. Owns the library's handle; keeps no state."""

import ctypes

import torch

from common.checkpoint.layers import AttentionOptions
from common.engine.contract.attention import AttentionBatch, LayerKV
from common.engine.contract.draws import Candidates
from common.engine.contract.elementwise import TorchElementwise
from common.engine.devices.cpu.native.build import load_library
from common.engine.devices.cpu.native.products import native_products
from common.engine.devices.cpu.native.signature import function

SUPPORTED = (torch.float32, torch.bfloat16)


class NativeOps:
    """Element-wise work, single-token attention and draws on the CPU. Not for other devices."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._add_rms_norm = function(library, "pdserve_add_rms_norm", "pppppfiibb")
        self._silu_mul = function(library, "pdserve_silu_mul", "ppiibb")
        self._rope_write = function(library, "pdserve_rope_write", "ppppppiiipppiiiibb")
        self._decode_attention = function(library, "pdserve_decode_attention", "ppppiiiipppiiifbb")
        self._best = function(library, "pdserve_best", "piiippb")
        self._draw_candidates = function(library, "pdserve_draw_candidates", "pppipppppiib")
        self._torch = TorchElementwise()
        self.products = native_products(library)  # None where the processor has no bfloat16 products

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / rms(x) * weight over the last axis."""
        if not _is_plain(x) or x.dtype != weight.dtype:
            return self._torch.rms_norm(x, weight, eps)
        out = torch.empty_like(x)
        self._norm(out, None, x, None, weight, eps)
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rms_norm(x + residual), x + residual)"""
        if not (_is_plain(x) and _is_plain(residual)) or not x.dtype == residual.dtype == weight.dtype:
            return self._torch.add_rms_norm(x, residual, weight, eps)
        assert x.shape == residual.shape, f"{x.shape} and {residual.shape}"
        out, total = torch.empty_like(x), torch.empty_like(x)
        self._norm(out, total, x, residual, weight, eps)
        return out, total

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up of [num_rows, 2 * size], gate first."""
        if not _is_plain(gate_up):
            return self._torch.silu_mul(gate_up)
        num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty((num_rows, size))
        self._silu_mul(out.data_ptr(), gate_up.data_ptr(), num_rows, size, *_kind(out))
        return out

    def rope_write(
        self,
        q: torch.Tensor,  # [num_tokens, num_heads, head_dim], heads of a token contiguous; k and v likewise
        k: torch.Tensor,
        v: torch.Tensor,
        cos_sin: torch.Tensor,  # [max_position, head_dim] float32
        kv: LayerKV,  # not quantized
        batch: AttentionBatch,
    ) -> torch.Tensor:
        """Rotated q; rotated k and v go to their slots, a slot of -1 is not written."""
        num_tokens, num_heads, head_dim = q.shape
        for part in (q, k, v):
            assert part.stride()[1:] == (head_dim, 1), f"strides {part.stride()}"
        rotated = torch.empty(q.shape, dtype=q.dtype)
        keys, values = kv
        sizes = num_tokens, num_heads, k.shape[1], head_dim
        sources = q.data_ptr(), k.data_ptr(), v.data_ptr(), q.stride(0), k.stride(0), v.stride(0)
        self._rope_write(
            rotated.data_ptr(), keys.data_ptr(), values.data_ptr(), *sources, cos_sin.data_ptr(),
            batch.positions.data_ptr(), batch.slot_mapping.data_ptr(), *sizes, *_kind(q),
        )  # fmt: skip
        return rotated

    def decode_attention(
        self, out: torch.Tensor, q: torch.Tensor, kv: LayerKV, batch: AttentionBatch, options: AttentionOptions
    ) -> None:
        """Rows of `out` and `q` [num_tokens, num_heads, head_dim] whose sequence has one new token; others stay.

        Without a soft cap. Of a window only its tokens are read.
        """
        keys, values = kv
        _, block_size, num_kv_heads, head_dim = keys.shape
        tables = batch.block_tables
        self._decode_attention(
            out.data_ptr(), q.data_ptr(), keys.data_ptr(), values.data_ptr(),
            block_size, q.shape[1], num_kv_heads, head_dim, batch.cu_seqlens_q.data_ptr(), batch.seq_lens.data_ptr(),
            tables.data_ptr(), tables.stride(0), tables.shape[0], options.window, options.scale, *_kind(q),
        )  # fmt: skip

    def best(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Per row of float32 [num_rows, vocab_size]: the greatest logit, NaN where any is, and its first token id."""
        values = torch.empty(logits.shape[0], dtype=torch.float32)
        token_ids = torch.empty(logits.shape[0], dtype=torch.int64)
        self._best(
            logits.data_ptr(), logits.stride(0), *logits.shape, values.data_ptr(), token_ids.data_ptr(), _threads()
        )
        return values, token_ids

    def draw_candidates(
        self,
        logits: torch.Tensor,  # [num_rows, vocab_size] float32
        rows: torch.Tensor,  # [num_drawn] int64
        temperatures: torch.Tensor,  # [num_drawn] float32
        best_ids: torch.Tensor,  # [num_drawn] int64: each row's best
        keys: torch.Tensor,  # [2, num_drawn] int32: low and high half of each row's noise key
    ) -> Candidates:
        """The tokens among which each drawn row's Gumbel-max surely is."""
        num_rows, size = rows.shape[0], logits.shape[1]
        found = torch.empty(num_rows * size, dtype=torch.int32)
        counts = torch.empty(num_rows, dtype=torch.int32)
        self._draw_candidates(
            found.data_ptr(), counts.data_ptr(), logits.data_ptr(), logits.stride(0), rows.data_ptr(),
            temperatures.data_ptr(), best_ids.data_ptr(), keys[0].data_ptr(), keys[1].data_ptr(), num_rows, size,
            _threads(),
        )  # fmt: skip
        num_found = counts.tolist()
        return Candidates(found[: sum(num_found)], num_found)

    def _norm(
        self,
        out: torch.Tensor,
        total: torch.Tensor | None,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
    ) -> None:
        size = x.shape[-1]
        sums = (total.data_ptr() if total is not None else None, x.data_ptr())
        other = residual.data_ptr() if residual is not None else None
        rows = x.numel() // size
        self._add_rms_norm(out.data_ptr(), *sums, other, weight.data_ptr(), eps, rows, size, *_kind(x))


def native_ops() -> NativeOps | None:
    """The operators where they can be had, else None: then torch's are used."""
    library = load_library()
    return NativeOps(library) if library is not None else None


def _is_plain(x: torch.Tensor) -> bool:
    return x.is_contiguous() and x.dtype in SUPPORTED


def _kind(x: torch.Tensor) -> tuple[bool, int]:
    return x.dtype == torch.bfloat16, _threads()


def _threads() -> int:
    return torch.get_num_threads()
