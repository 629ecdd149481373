"""`Elementwise` by Triton kernels. Imports triton: import this module only where the triton path was chosen."""

import torch

from common.engine.devices.triton.norm import add_rms_norm, rms_norm
from common.engine.devices.triton.silu_mul import silu_mul


class TritonElementwise:
    """Stateless; everything runs on the current stream."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / rms(x) * weight over the last axis."""
        return rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rms_norm(x + residual), x + residual), the sum rounded to its type first."""
        return add_rms_norm(x, residual, weight, eps)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up of [num_rows, 2 * size], gate first."""
        return silu_mul(*gate_up.chunk(2, dim=-1))
