"""RMSNorm (Zhang & Sennrich 2019) in one pass, with the residual's sum or of each head."""

import torch
import triton
import triton.language as tl

from common.engine.devices.triton.launch import jit, launch


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in float64: the sum is rounded to the residual's type before it is normalized."""
    total = (x.double() + residual.double()).to(residual.dtype)
    scale = torch.rsqrt(total.double().square().mean(-1, keepdim=True) + eps)
    return (total.double() * scale * weight.double()).to(x.dtype), total


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The same in float64."""
    scale = torch.rsqrt(x.double().square().mean(-1, keepdim=True) + eps)
    return (x.double() * scale * weight.double()).to(x.dtype)


@jit
def rms_norm_kernel(
    out_ptr: tl.tensor,  # [num_tokens, NUM_HEADS, HIDDEN], contiguous
    total_ptr: tl.tensor,  # [num_tokens, HIDDEN], contiguous; written only if HAS_RESIDUAL
    x_ptr: tl.tensor,  # [num_tokens, NUM_HEADS, HIDDEN], token stride given
    residual_ptr: tl.tensor,  # [num_tokens, HIDDEN], token stride given; read only if HAS_RESIDUAL
    weight_ptr: tl.tensor,  # [HIDDEN]
    eps: tl.tensor,
    x_token_stride: tl.tensor,
    residual_token_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HIDDEN: tl.constexpr,
    HIDDEN_TILE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
) -> None:
    """grid: (num_tokens * NUM_HEADS,). With a residual NUM_HEADS is 1."""
    row = tl.program_id(0).to(tl.int64)
    token = (tl.program_id(0) // NUM_HEADS).to(tl.int64)
    dim = tl.arange(0, HIDDEN_TILE)
    mask = dim < HIDDEN
    x_ptr += token * x_token_stride + row % NUM_HEADS * HIDDEN
    total = tl.load(x_ptr + dim, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + token * residual_token_stride + dim, mask=mask, other=0.0).to(tl.float32)
        rounded = (total + residual).to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * HIDDEN + dim, rounded, mask=mask)
        total = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(total * total, 0) / HIDDEN + eps)
    weight = tl.load(weight_ptr + dim, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * HIDDEN + dim, (total * scale * weight).to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm(
    x: torch.Tensor,  # [num_tokens, hidden] or [num_tokens, num_heads, head_dim], heads of a token contiguous
    weight: torch.Tensor,  # [hidden]
    eps: float,
) -> torch.Tensor:
    """RMSNorm(x) * weight, new: within 2**-p of the reference, relatively (p as below)."""
    num_heads = x.shape[1] if x.dim() == 3 else 1
    assert x[:1].is_contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_norm(out, out, x, x, weight, eps, num_heads, has_residual=False)
    return out


def add_rms_norm(
    x: torch.Tensor,  # [num_tokens, hidden], last dimension contiguous
    residual: torch.Tensor,  # [num_tokens, hidden], last dimension contiguous
    weight: torch.Tensor,  # [hidden]
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(RMSNorm(x + residual) * weight, x + residual), both new.

    Two roundings: within 2 * 2**-p of the reference, relatively (p = 21 in float32, 7 in bfloat16, 10 in float16).
    """
    assert x.stride(-1) == residual.stride(-1) == 1
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty(x.shape, dtype=residual.dtype, device=x.device)
    _launch_norm(out, total, x, residual, weight, eps, 1, has_residual=True)
    return out, total


def _launch_norm(
    out: torch.Tensor,
    total: torch.Tensor,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    num_heads: int,
    *,
    has_residual: bool,
) -> None:
    hidden = x.shape[-1]
    tile = triton.next_power_of_2(hidden)
    launch(
        rms_norm_kernel, (x.shape[0] * num_heads,), x.device,
        out, total, x, residual, weight, eps, x.stride(0), residual.stride(0),
        NUM_HEADS=num_heads, HIDDEN=hidden, HIDDEN_TILE=tile, HAS_RESIDUAL=has_residual,
        num_warps=min(16, max(1, tile // 512)),
    )  # fmt: skip
