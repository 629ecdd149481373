"""Quantized blocks of GGUF files to numbers, compiled.

Of the file, into bfloat16, it reads 0.3 to 1.6 GB/s (Q4_K 1.3, Q8_0 1.6), the gguf library's numpy 0.01 to 0.4 (CPU
time of one thread of a Xeon with AVX-512, 2026-12).
"""

import ctypes
import math
from functools import lru_cache

import numpy as np
import torch

from common.checkpoint.ggml_types import GGML_TYPES
from common.engine.devices.cpu.native.build import load_library
from common.engine.devices.cpu.native.signature import function

KNOWN = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
TYPE_IDS = {ggml.name: type_id for type_id, ggml in GGML_TYPES.items() if ggml.name in KNOWN}


def dequantize(kind: str, raw: np.ndarray, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
    """`raw`: uint8, the tensor's bytes in one piece. None for a format or dtype that is not known, or no compiler."""
    native = _native() if kind in TYPE_IDS and dtype in (torch.float32, torch.bfloat16) else None
    if native is None:
        return None
    assert raw.flags.c_contiguous, "blocks one after another"
    out = torch.empty(shape, dtype=dtype)
    type_id = TYPE_IDS[kind]
    num_blocks = math.prod(shape) // GGML_TYPES[type_id].block_size
    assert num_blocks * GGML_TYPES[type_id].block_bytes == raw.nbytes, f"{kind} {shape} in {raw.nbytes} bytes"
    threads = torch.get_num_threads()
    native(out.data_ptr(), raw.ctypes.data, num_blocks, type_id, dtype == torch.bfloat16, threads)
    return out


@lru_cache(maxsize=1)
def _native() -> "ctypes._NamedFuncPointer | None":
    library = load_library()
    return None if library is None else function(library, "pdserve_dequantize", "ppiibb")
