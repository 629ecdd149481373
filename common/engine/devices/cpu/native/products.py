"""Products with packed bfloat16 weights, see `product.h`. Owns the layout of what is passed to it.

All 121 products of the demo model, one pass, 1 thread (EPYC, family 26, 2026-11): 6.2, 7.1 and 19.6 ms for 1, 8 and
32 rows.
"""

import ctypes
from collections.abc import Callable

import torch

from common.engine.devices.cpu.native.signature import function
from common.engine.kv.pages import HugeArena

BFLOAT16_BITS = 16
GROUP = 48  # outputs that are packed together, see product.h
SPAN_BYTES = {8: (64, 2), 4: (32, 4)}  # inputs that share a scale, and its bytes, see quantized.h
MULTIPLE = {BFLOAT16_BITS: 2, 8: 64, 4: 64}  # of which a number of inputs must be


class ProductStruct(ctypes.Structure):
    """`Product` of product.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weights", "scales", "bias")),
        *((name, ctypes.c_int64) for name in ("num_out", "num_in", "bits")),
    )


class NativeProducts:
    """Packs weights, in so many bits each, and multiplies with them. Only where `pdserve_has_products` says so."""

    def __init__(self, library: ctypes.CDLL, bits: int = BFLOAT16_BITS, arena: HugeArena | None = None) -> None:
        self.library = library
        self.bits = bits
        self._arena = arena or HugeArena()
        self._pack = function(library, "pdserve_pack", "pppiiib")
        self._multiply = function(library, "pdserve_multiply", "ppipb")
        self._packed_bytes: Callable[..., int] = library.pdserve_packed_bytes
        library.pdserve_packed_bytes.argtypes = [ctypes.c_int64] * 3
        library.pdserve_packed_bytes.restype = ctypes.c_int64

    @property
    def is_quantized(self) -> bool:
        """Fewer bits than the weights came with."""
        return self.bits < BFLOAT16_BITS

    def with_bits(self, bits: int) -> "NativeProducts":
        """The same for weights of 16, 8 or 4 bits, in the same memory."""
        return NativeProducts(self.library, bits, self._arena)

    def can_pack(self, weight: torch.Tensor) -> bool:
        """The instructions take 2 inputs at once, and a scale is shared by more."""
        is_fit = weight.shape[1] % MULTIPLE[self.bits] == 0
        return is_fit and weight.dtype == torch.bfloat16 and weight.device.type == "cpu"

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> "PackedProduct":
        """weight: [num_out, num_in] bfloat16; bias: [num_out]"""
        num_out, num_in = weight.shape
        source = weight.contiguous()
        packed = self._arena.take(self._packed_bytes(num_out, num_in, self.bits))
        scales = self._new_scales(num_out, num_in)
        address = scales.data_ptr() if scales is not None else None
        sizes = num_out, num_in, self.bits
        self._pack(packed.data_ptr(), address, source.data_ptr(), *sizes, torch.get_num_threads())
        return PackedProduct(self, (packed, scales, bias.contiguous() if bias is not None else None), sizes)

    def multiply(self, product: "PackedProduct", x: torch.Tensor) -> torch.Tensor:
        """x: [num_rows, num_in] bfloat16 -> [num_rows, num_out]"""
        struct = product.struct
        assert x.shape[1] == struct.num_in, f"{x.shape[1]} inputs, expected {struct.num_in}"
        assert x.dtype == torch.bfloat16, f"{x.dtype}"
        rows = x.contiguous()
        out = torch.empty((rows.shape[0], struct.num_out), dtype=torch.bfloat16)
        self._multiply(
            out.data_ptr(), rows.data_ptr(), rows.shape[0], ctypes.addressof(struct), torch.get_num_threads()
        )
        return out

    def _new_scales(self, num_out: int, num_in: int) -> torch.Tensor | None:
        if self.bits == BFLOAT16_BITS:
            return None
        span, num_bytes = SPAN_BYTES[self.bits]
        return self._arena.take(-(-num_out // GROUP) * GROUP * (num_in // span) * num_bytes)


class PackedProduct:
    """One packed weight. Owns the memory that `struct` points to."""

    def __init__(
        self,
        products: NativeProducts,
        tensors: tuple[torch.Tensor | None, ...],  # packed weight, scales, bias
        sizes: tuple[int, int, int],  # num_out, num_in, bits
    ) -> None:
        self._products = products
        self._tensors = tensors
        pointers = (tensor.data_ptr() if tensor is not None else None for tensor in tensors)
        self.struct = ProductStruct(*pointers, *sizes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._products.multiply(self, x)


def native_products(library: ctypes.CDLL) -> NativeProducts | None:
    """None where the processor lacks AVX512-BF16."""
    return NativeProducts(library) if library.pdserve_has_products() else None
