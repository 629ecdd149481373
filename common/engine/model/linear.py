"""Linear layers. On the CPU bfloat16 weights are packed for our own products, else for oneDNN, where those exist.

oneDNN: packed against F.linear, microseconds per call for 3072x576 (2 vCPU Zen 4, torch 2.13, 1 thread, 2026-11):
bf16 rows 1/8/32/512: 102/156/318/3700 against 215/245/430/3871; fp32: 189/276/633/7422 against 431/748/1446/17262.
The layout chosen for 8 rows or more serves all row counts equally well; the one for 1 row does not.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from common.checkpoint import CheckpointError
from common.engine.devices.cpu.native.products import NativeProducts, PackedProduct

PACK_FOR_NUM_ROWS = 32


class Linear:
    """y = x @ weight.T + bias. Owns the weight in whichever layout is fastest on its device."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, products: NativeProducts | None = None
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self._bias = bias
        self._weight = weight
        self._apply: Callable[..., torch.Tensor] = _apply_plain
        self.product: PackedProduct | None = None  # the weight, where it is packed for our own products
        is_packed = products is not None and products.can_pack(weight)
        if products is not None and products.is_quantized and not is_packed:
            raise CheckpointError(
                f"a weight of {weight.shape[1]} {weight.dtype} inputs cannot have {products.bits} bits"
            )
        if products is not None and is_packed:
            self.product = products.pack(weight, bias)
            self._weight = weight.new_empty(0)
        elif weight.device.type == "cpu" and _can_pack():
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_FOR_NUM_ROWS)
            self._apply = _apply_packed

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [num_rows, in_features] -> [num_rows, out_features]"""
        if self.product is not None:
            return self.product(x)
        return self._apply(x, self._weight, self._bias)


def _apply_plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x, weight, bias)


def _apply_packed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result


def _can_pack() -> bool:
    """The operators are private to torch: use them only where they are there and give the right product."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    x, weight = torch.eye(4), torch.arange(16.0).view(4, 4)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_FOR_NUM_ROWS)
        return torch.equal(_apply_packed(x, packed, None), weight.T)
    except (RuntimeError, TypeError, AttributeError, NotImplementedError):
        return False
