"""The element-wise work between a layer's products: what it needs, and torch's version for every device."""

from typing import Protocol

import torch
import torch.nn.functional as F

from common.checkpoint.layers import CLAMP, CLAMPED_SLOPE, Activation


class Elementwise(Protocol):
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / rms(x) * weight over the last axis."""
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rms_norm(x + residual), x + residual), the sum rounded to its type first."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up of [num_rows, 2 * size], gate first."""
        ...


def activate(ops: Elementwise, activation: Activation, gate_up: torch.Tensor) -> torch.Tensor:
    """activation(gate) * up of [num_rows, 2 * size], gate first; clamped as `Activation` has it."""
    if activation == "silu":
        return ops.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "gelu_tanh":
        return F.gelu(gate, approximate="tanh").mul_(up)
    gate, up = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP)
    return gate * (CLAMPED_SLOPE * gate).sigmoid() * (up + 1)


class TorchElementwise:
    """One torch operator after another."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return F.rms_norm(x, (weight.shape[0],), weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)
