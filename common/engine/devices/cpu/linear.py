"""Linear layers. On the CPU bfloat16 weights are packed for our own products, else for oneDNN, where those exist.

oneDNN: packed against F.linear, microseconds per call for 3072x576 (2 vCPU Zen 4, torch 2.13, 1 thread, 2026-11):
bf16 rows 1/8/32/512: 102/156/318/3700 against 215/245/430/3871; fp32: 189/276/633/7422 against 431/748/1446/17262.
The layout chosen for 8 rows or more serves all row counts equally well; the one for 1 row does not.
"""

import torch
import torch.nn.functional as F

from common.checkpoint import CheckpointError
from common.engine.contract.device import Linear
from common.engine.devices.cpu.native.products import NativeProducts

PACK_FOR_NUM_ROWS = 32


def cpu_linear(weight: torch.Tensor, bias: torch.Tensor | None, products: NativeProducts | None) -> Linear:
    """In the layout that is fastest here. Raises CheckpointError where `products` cannot have it in its bits."""
    num_out, num_in = weight.shape
    if products is not None and products.can_pack(weight):
        product = products.pack(weight, bias)
        return Linear(num_in, num_out, product, product)
    if products is not None and products.is_quantized:
        raise CheckpointError(f"a weight of {num_in} {weight.dtype} inputs cannot have {products.bits} bits")
    if _can_pack(weight.dtype):
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_FOR_NUM_ROWS)
        return Linear(num_in, num_out, lambda x: _apply_packed(x, packed, bias))
    return Linear(num_in, num_out, lambda x: F.linear(x, weight, bias))


def _apply_packed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result


def _can_pack(dtype: torch.dtype) -> bool:
    """The operators are private to torch: use them only where they are there and give the right product.

    For bfloat16 and float16 that depends on the processor: without AVX-512 or avx_ne_convert torch refuses them.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    x, weight = torch.eye(4, dtype=dtype), torch.arange(16.0, dtype=dtype).view(4, 4)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_FOR_NUM_ROWS)
        return torch.equal(_apply_packed(x, packed, None), weight.T)
    except (RuntimeError, TypeError, AttributeError, NotImplementedError):
        return False
