"""Weights that Hugging Face files store as codes with scales: which tensors make up one weight. No torch.

What is stored decides: a weight for which the file holds codes is read from them, any other as it is. The parts'
shapes are checked here; what the codes mean is computed in `common.engine.model.dequantize`.
"""

from collections.abc import Callable, Mapping

from common.checkpoint.quantization import QuantizationConfig
from common.checkpoint.safetensors_files import refuse_codes
from common.checkpoint.spec import CheckpointError
from common.checkpoint.tensors import Layout, QuantizedTensor, StoredTensor, Tensor

Tensors = Mapping[str, StoredTensor]
SCALED_KINDS = ("F8_E4M3", "I8")
# What stands beside codes for the activations, which stay as they are here.
IGNORED = ("input_scale", "input_zero_point", "output_scale", "activation_scale", "input_global_scale")


def assemble(config: QuantizationConfig, tensors: Tensors) -> dict[str, Tensor]:
    """`tensors` by the name of the weight that they make up. Raises CheckpointError that names a part which is missing
    or does not fit."""
    found: dict[str, Tensor] = {}
    used: set[str] = set()
    for name, tensor in tensors.items():
        stem, _, kind = name.rpartition(".")
        reader = _reader(kind, tensor)
        if reader is None:
            continue
        parts = _Parts(stem, tensors, used)
        found[f"{stem}.weight"] = reader(config, parts, parts.take(kind))
    for name, tensor in tensors.items():
        if name not in used and name.rpartition(".")[2] not in IGNORED:
            refuse_codes(tensor)
            found[name] = tensor
    return found


class _Parts:
    """The tensors of one module; remembers which were taken."""

    def __init__(self, stem: str, tensors: Tensors, used: set[str]) -> None:
        self.stem = stem
        self._tensors = tensors
        self._used = used

    def get(self, *names: str) -> StoredTensor | None:
        for name in names:
            if f"{self.stem}.{name}" in self._tensors:
                self._used.add(f"{self.stem}.{name}")
                return self._tensors[f"{self.stem}.{name}"]
        return None

    def take(self, *names: str) -> StoredTensor:
        tensor = self.get(*names)
        if tensor is None:
            raise CheckpointError(f"weight {self.stem}.{names[0]} is missing beside the codes")
        return tensor


_Reader = Callable[[QuantizationConfig, _Parts, StoredTensor], QuantizedTensor]


def _reader(kind: str, tensor: StoredTensor) -> _Reader | None:
    if kind == "weight" and tensor.kind in SCALED_KINDS:
        return _scaled
    return {"weight_packed": _packed, "qweight": _grouped}.get(kind)


def _scaled(config: QuantizationConfig, parts: _Parts, codes: StoredTensor) -> QuantizedTensor:
    """Scales of [out / rows, in / columns] blocks: of one for all, of rows, of groups of inputs, or of squares."""
    if parts.get("weight_zero_point") is not None:
        raise CheckpointError(f"{codes.path}: {parts.stem}.weight_zero_point is not supported for {codes.kind} weights")
    scale = parts.take("weight_scale_inv", "weight_scale", "scale")
    num_out, num_in = _matrix(codes)
    rows, columns = {0: (1, 1), 1: (*scale.shape, 1), 2: scale.shape}.get(len(scale.shape), (0, 0))
    block_rows, block_columns = config.block or (num_out, num_in)
    has_rows = rows in (1, num_out, -(-num_out // block_rows))
    is_whole = columns == 1 or columns == -(-num_in // block_columns) or (config.block is None and not num_in % columns)
    if not (columns and has_rows and is_whole):
        raise CheckpointError(f"{scale.path}: {scale.name} {scale.shape} does not fit a weight {codes.shape}")
    return QuantizedTensor("scaled", codes.shape, {"codes": codes, "scale": scale}, 8, block=config.block)


def _packed(config: QuantizationConfig, parts: _Parts, codes: StoredTensor) -> QuantizedTensor:
    """compressed-tensors: weight_packed [out, in * bits / 32], weight_scale [out, groups]."""
    num_out, num_words = _matrix(codes)
    scale, groups = parts.take("weight_scale"), parts.get("weight_g_idx")
    parts.get("weight_shape")
    num_in = num_words * 32 // config.bits
    found = {"codes": codes, "scale": scale} | ({} if groups is None else {"groups": groups})
    num_groups = _fits(scale, (num_out, None))[1]
    if (zeros := parts.get("weight_zero_point")) is not None:
        _fits(zeros, (-(-num_out * config.bits // 32), num_groups))
        found["zeros"] = zeros
    _whole_groups(scale, num_in, num_groups)
    if groups is not None:
        _fits(groups, (num_in,))
    return QuantizedTensor("packed", (num_out, num_in), found, config.bits)


def _grouped(config: QuantizationConfig, parts: _Parts, codes: StoredTensor) -> QuantizedTensor:
    """AWQ: qweight [in, out * bits / 32]; GPTQ: [in * bits / 32, out]; both: scales [groups, out], qzeros packed."""
    scale, zeros, per_word = parts.take("scales"), parts.take("qzeros"), 32 // config.bits
    first, second = _matrix(codes)
    is_awq = config.method == "awq"
    num_in, num_out = (first, second * per_word) if is_awq else (first * per_word, second)
    num_groups = _fits(scale, (None, num_out))[0]
    _fits(zeros, (num_groups, num_out // per_word))
    found = {"codes": codes, "scale": scale, "zeros": zeros}
    groups = None if is_awq else parts.get("g_idx")
    if groups is not None:
        _fits(groups, (num_in,))
        found["groups"] = groups
    else:
        _whole_groups(scale, num_in, num_groups)
    layout: Layout = "awq" if is_awq else "gptq"
    return QuantizedTensor(layout, (num_out, num_in), found, config.bits, config.zero_offset)


def _matrix(codes: StoredTensor) -> tuple[int, int]:
    if len(codes.shape) != 2:
        raise CheckpointError(f"{codes.path}: {codes.name} {codes.shape} is not a matrix of codes")
    return codes.shape[0], codes.shape[1]


def _fits(tensor: StoredTensor, shape: tuple[int | None, ...]) -> tuple[int, ...]:
    """None = any size."""
    fits = len(tensor.shape) == len(shape) and all(
        size in (None, found) for size, found in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        wanted = tuple("any" if size is None else size for size in shape)
        raise CheckpointError(f"{tensor.path}: {tensor.name}: expected shape {wanted}, got {tensor.shape}")
    return tensor.shape


def _whole_groups(scale: StoredTensor, num_in: int, num_groups: int) -> None:
    if not num_groups or num_in % num_groups:
        raise CheckpointError(f"{scale.path}: {scale.name}: {num_in} inputs are not {num_groups} groups of one size")
