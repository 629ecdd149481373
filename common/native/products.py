"""Products with packed bfloat16 weights, see `product.h`. Owns the layout of what is passed to it.

All 121 products of the demo model, one pass, 1 thread (EPYC, family 26, 2026-11): 6.2, 7.1 and 19.6 ms for 1, 8 and
32 rows. docs/performance.md has oneDNN's beside them.
"""

import ctypes

import torch

from common.native.huge_pages import HugeArena
from common.native.signature import function


class ProductStruct(ctypes.Structure):
    """`Product` of product.h."""

    _fields_ = (
        ("weights", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("num_out", ctypes.c_int64),
        ("num_in", ctypes.c_int64),
    )


class NativeProducts:
    """Packs weights and multiplies with them. Only where `pdserve_has_products` says so."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self._arena = HugeArena()
        self._pack = function(library, "pdserve_pack", "ppiib")
        self._multiply = function(library, "pdserve_multiply", "ppipbb")
        library.pdserve_packed_size.restype = ctypes.c_int64

    def can_pack(self, weight: torch.Tensor) -> bool:
        """Pairs of inputs are what the instruction takes."""
        return weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and weight.shape[1] % 2 == 0

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> "PackedProduct":
        """weight: [num_out, num_in] bfloat16; bias: [num_out]"""
        num_out, num_in = weight.shape
        source = weight.contiguous()
        size = self.library.pdserve_packed_size(ctypes.c_int64(num_out), ctypes.c_int64(num_in))
        packed = self._arena.take(2 * size)
        self._pack(packed.data_ptr(), source.data_ptr(), num_out, num_in, torch.get_num_threads())
        return PackedProduct(self, packed, bias, num_out, num_in)

    def multiply(self, product: "PackedProduct", x: torch.Tensor) -> torch.Tensor:
        """x: [num_rows, num_in] bfloat16 -> [num_rows, num_out]"""
        struct = product.struct
        assert x.shape[1] == struct.num_in, f"{x.shape[1]} inputs, expected {struct.num_in}"
        assert x.dtype == torch.bfloat16, f"{x.dtype}"
        rows = x.contiguous()
        out = torch.empty((rows.shape[0], struct.num_out), dtype=torch.bfloat16)
        address = ctypes.addressof(struct)
        self._multiply(out.data_ptr(), rows.data_ptr(), rows.shape[0], address, False, torch.get_num_threads())
        return out


class PackedProduct:
    """One packed weight. Owns the memory that `struct` points to."""

    def __init__(
        self, products: NativeProducts, packed: torch.Tensor, bias: torch.Tensor | None, num_out: int, num_in: int
    ) -> None:
        self._products = products
        self._tensors = packed, bias.contiguous() if bias is not None else None
        pointers = (tensor.data_ptr() if tensor is not None else None for tensor in self._tensors)
        self.struct = ProductStruct(*pointers, num_out, num_in)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._products.multiply(self, x)


def native_products(library: ctypes.CDLL) -> NativeProducts | None:
    """None where the processor lacks AVX512-BF16."""
    return NativeProducts(library) if library.pdserve_has_products() else None
