"""Residual add and RMSNorm (Zhang & Sennrich 2019) in one pass."""

import torch
import triton
import triton.language as tl

from common.kernels.launch import jit, launch


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in float64: the sum is rounded to the residual's type before it is normalized."""
    total = (x.double() + residual.double()).to(residual.dtype)
    scale = torch.rsqrt(total.double().square().mean(-1, keepdim=True) + eps)
    return (total.double() * scale * weight.double()).to(x.dtype), total


@jit
def add_rms_norm_kernel(
    out_ptr: tl.tensor,  # [num_tokens, HIDDEN], contiguous
    total_ptr: tl.tensor,  # [num_tokens, HIDDEN], contiguous
    x_ptr: tl.tensor,  # [num_tokens, HIDDEN], token stride given
    residual_ptr: tl.tensor,  # [num_tokens, HIDDEN], token stride given
    weight_ptr: tl.tensor,  # [HIDDEN]
    eps: tl.tensor,
    x_token_stride: tl.tensor,
    residual_token_stride: tl.tensor,
    HIDDEN: tl.constexpr,
    HIDDEN_TILE: tl.constexpr,
) -> None:
    """grid: (num_tokens,)."""
    token = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, HIDDEN_TILE)
    mask = dim < HIDDEN
    x = tl.load(x_ptr + token * x_token_stride + dim, mask=mask, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + token * residual_token_stride + dim, mask=mask, other=0.0).to(tl.float32)
    total = (x + residual).to(total_ptr.dtype.element_ty)
    tl.store(total_ptr + token * HIDDEN + dim, total, mask=mask)
    total = total.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(total * total, 0) / HIDDEN + eps)
    weight = tl.load(weight_ptr + dim, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * HIDDEN + dim, (total * scale * weight).to(out_ptr.dtype.element_ty), mask=mask)


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
    num_tokens, hidden = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty(x.shape, dtype=residual.dtype, device=x.device)
    tile = triton.next_power_of_2(hidden)
    launch(
        add_rms_norm_kernel, (num_tokens,), x.device,
        out, total, x, residual, weight, eps, x.stride(0), residual.stride(0),
        HIDDEN=hidden, HIDDEN_TILE=tile, num_warps=min(16, max(1, tile // 512)),
    )  # fmt: skip
    return out, total
