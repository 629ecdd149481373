"""The CPU as a `Device`: compiled operators where there is a compiler, torch's elsewhere."""

from collections.abc import Iterable, Mapping, Sequence

import torch

from common.checkpoint import CheckpointError
from common.checkpoint.layers import Activation, Experts
from common.engine.contract.attention import LayerKV
from common.engine.contract.device import Capture, CompiledRun, ExpertWeights, GroupedMlp, Layer, Linear, Mlp, Tail
from common.engine.contract.elementwise import Elementwise, TorchElementwise
from common.engine.contract.experts import torch_experts
from common.engine.devices.cpu.attention import CpuAttention
from common.engine.devices.cpu.compiled import compile_layers
from common.engine.devices.cpu.linear import cpu_linear
from common.engine.devices.cpu.native.experts import NativeExperts, is_packed
from common.engine.devices.cpu.native.ops import NativeOps, native_ops
from common.values.config import Dtype, Quantization

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class CpuDevice:
    """`Device`. Keeps what its attention needs of the step being computed, nothing else that changes."""

    place = torch.device("cpu")
    memory = None

    def __init__(self, dtype: torch.dtype, ops: NativeOps | None, quantization: Quantization = "none") -> None:
        """`ops` = None: torch's operators only. Raises CheckpointError where fewer bits cannot be had."""
        self.dtype = dtype
        self.draws = ops
        self.attention = CpuAttention(ops)
        self.elementwise: Elementwise = ops or TorchElementwise()
        self._products = ops.products if ops is not None else None
        if quantization != "none":
            if self._products is None or dtype != torch.bfloat16:
                raise CheckpointError(
                    f"quantization={quantization} needs bfloat16 on a CPU with AVX512-BF16, and a C++ compiler"
                )
            self._products = self._products.with_bits({"int8": 8, "int4": 4}[quantization])

    @classmethod
    def open(cls, dtype: Dtype, quantization: Quantization) -> "CpuDevice":
        """Compiles the operators at the first use on a machine. dtype auto = bfloat16 where the hardware has it."""
        return cls(cpu_dtype(dtype), native_ops(), quantization)

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, min_bits: int = 4) -> Linear:
        products = self._products
        if products is not None and products.bits < min_bits:
            products = products.with_bits(min_bits)
        return cpu_linear(weight, bias, products)

    def grouped_mlp(self, experts: Experts, activation: Activation, weights: Iterable[ExpertWeights]) -> GroupedMlp:
        mlps = [
            Mlp(self.linear(one.gate_up, one.gate_up_bias), self.linear(one.down, one.down_bias)) for one in weights
        ]
        if self._products is not None and activation == "silu" and all(map(is_packed, mlps)):
            native = NativeExperts(self._products.library, experts, mlps)
            return GroupedMlp(native, native)
        return torch_experts(mlps, self.elementwise, activation)

    def compile(self, layers: Sequence[Layer], tail: Tail) -> Mapping[int, CompiledRun]:
        return compile_layers(layers, tail, self._products) if self._products is not None else {}

    def tune(self, kv: LayerKV, num_heads: int, head_dim: int) -> None:
        """Nothing to choose."""

    def new_capture(self) -> Capture | None:
        return None


def cpu_dtype(dtype: Dtype) -> torch.dtype:
    """auto = bfloat16 where it is computed in hardware, else float32."""
    if dtype != "auto":
        return DTYPES[dtype]
    capabilities = torch.cpu.get_capabilities()
    has_bfloat16 = capabilities.get("avx512_bf16", False) or capabilities.get("amx_bf16", False)
    return torch.bfloat16 if has_bfloat16 else torch.float32
