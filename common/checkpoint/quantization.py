"""`quantization_config` of config.json: how the weights are stored, or which method or field is not supported. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from common.checkpoint.spec import CheckpointError

Config = Mapping[str, Any]
Method = Literal["fp8", "compressed-tensors", "awq", "gptq", "mxfp4"]
FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    method: Method
    bits: int
    block: tuple[int, int] | None = None  # rows and columns that share a scale, where that is a square
    zero_offset: int = 0  # what is added to each zero point that is stored

    @property
    def description(self) -> str:
        """For people."""
        blocks = f" in blocks of {self.block[0]}x{self.block[1]}" if self.block else ""
        return f"{self.method}, {self.bits} bits{blocks}"


def read_quantization(config: Config) -> QuantizationConfig | None:
    """None = the weights are stored as numbers. Raises CheckpointError by field."""
    fields = config.get("quantization_config", config.get("compression_config"))
    if fields is None:
        return None
    if not isinstance(fields, Mapping):
        raise CheckpointError(f"config.json: quantization_config={fields!r:.80} is not supported")
    method = fields.get("quant_method")
    if not isinstance(method, str) or method not in READERS:
        raise _unsupported("quant_method", method, f"only {', '.join(READERS)}")
    return READERS[method](fields)


def _fp8(fields: Config) -> QuantizationConfig:
    _expect(fields, "fmt", ("e4m3",), "e4m3")
    return QuantizationConfig("fp8", 8, _block(fields, "weight_block_size"))


def _awq(fields: Config) -> QuantizationConfig:
    _expect(fields, "version", ("gemm", "GEMM"), "gemm")
    _expect(fields, "zero_point", (True,), True)
    return QuantizationConfig("awq", _bits(fields, "bits", (4,)))


def _gptq(fields: Config) -> QuantizationConfig:
    """The older format stores each zero point less one."""
    version = _expect(fields, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    return QuantizationConfig("gptq", _bits(fields, "bits", (4, 8)), zero_offset=0 if version == "gptq_v2" else 1)


def _compressed_tensors(fields: Config) -> QuantizationConfig:
    """All weights of one kind; what is said of the activations changes nothing here."""
    stored = _expect(fields, "format", FORMATS, None)
    sparsity = (fields.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise _unsupported("sparsity_config.format", sparsity, "only dense")
    groups = fields.get("config_groups")
    kinds = [group.get("weights") for group in groups.values()] if isinstance(groups, Mapping) else []
    if not kinds or any(kind != kinds[0] for kind in kinds) or not isinstance(kinds[0], Mapping):
        raise _unsupported("config_groups", groups, "only groups with weights of one kind")
    weights = kinds[0]
    if stored != "pack-quantized":
        _expect(weights, "symmetric", (True,), True)
    strategy = _expect(weights, "strategy", ("tensor", "channel", "group", "block"), None)
    block = _block(weights, "block_structure") if strategy == "block" else None
    bits = _bits(weights, "num_bits", (4, 8) if stored == "pack-quantized" else (8,))
    return QuantizationConfig("compressed-tensors", bits, block)


READERS: Mapping[str, Callable[[Config], QuantizationConfig]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "awq": _awq,
    "gptq": _gptq,
    "mxfp4": lambda fields: QuantizationConfig("mxfp4", 4),
}


def _expect(fields: Config, name: str, allowed: tuple[Any, ...], absent: Any) -> Any:
    value = fields.get(name, absent)
    if value not in allowed:
        raise _unsupported(name, value, f"only {', '.join(map(str, allowed))}")
    return value


def _bits(fields: Config, name: str, allowed: tuple[int, ...]) -> int:
    value = fields.get(name)
    if isinstance(value, bool) or value not in allowed:
        raise _unsupported(name, value, f"only {', '.join(map(str, allowed))}")
    assert isinstance(value, int)
    return value


def _block(fields: Config, name: str) -> tuple[int, int] | None:
    """None for what is absent or null."""
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(type(size) is int and size > 0 for size in value):
        raise _unsupported(name, value, "only two positive integers")
    return value[0], value[1]


def _unsupported(name: str, value: Any, known: str) -> CheckpointError:
    return CheckpointError(f"config.json: quantization_config: {name}={value!r:.80} is not supported, {known}")
