"""From the codes and scales of Hugging Face files to numbers, one weight at a time."""

from collections.abc import Callable, Mapping

import torch

from common.checkpoint.tensors import QuantizedTensor

Parts = Mapping[str, torch.Tensor]
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_E2M1, *(-number for number in _E2M1))
# Which of the eight fours of an int32 holds the n-th of eight columns (AWQ).
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def dequantize(tensor: QuantizedTensor, parts: Parts) -> torch.Tensor:
    """[out_features, in_features] float32. `parts` as `QuantizedTensor.parts`."""
    if tensor.layout == "transposed":
        return parts["codes"].float().T.contiguous()
    if tensor.layout == "mxfp4":
        return _mxfp4(parts["codes"], parts["scale"])
    if tensor.layout == "scaled":
        return _scaled(parts["codes"], parts["scale"].float(), tensor.block)
    codes = _CODES[tensor.layout](tensor, parts).float()  # [out, in]
    scales, zeros = _scales_and_zeros(tensor, parts)  # [out, groups]
    if "groups" in parts:
        of_input = parts["groups"].long()
        return codes.sub_(zeros[:, of_input]).mul_(scales[:, of_input])
    grouped = codes.view(*scales.shape, -1)
    return grouped.sub_(zeros[..., None]).mul_(scales[..., None]).view(tensor.shape)


def _scaled(codes: torch.Tensor, scale: torch.Tensor, block: tuple[int, int] | None) -> torch.Tensor:
    numbers = codes.float()
    num_out, num_in = numbers.shape
    scale = scale.view(scale.shape[0] if scale.ndim else 1, -1)
    rows, columns = scale.shape
    block_rows, block_columns = block or (num_out, num_in // columns)
    if columns > 1:
        scale = scale.repeat_interleave(block_columns, 1)[:, :num_in]
    if rows in (1, num_out):
        return numbers.mul_(scale)
    for row in range(rows):  # no copy of all scales as large as the weight
        numbers[row * block_rows : (row + 1) * block_rows] *= scale[row]
    return numbers


def _mxfp4(codes: torch.Tensor, powers: torch.Tensor) -> torch.Tensor:
    """uint8 [out, groups, 16] and [out, groups], biased by 127 (OCP Microscaling Formats, 2023) -> [out, in]"""
    halves = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(2).long()  # [out, groups, 32]
    numbers = torch.tensor(E2M1)[halves]
    return numbers.mul_(torch.exp2(powers.float() - 127)[..., None]).flatten(1)


def _unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [rows, words] -> the unsigned codes [rows, words * 32 / bits], lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).flatten(1)


def _awq(words: torch.Tensor) -> torch.Tensor:
    """int32 [rows, words] -> codes [rows, words * 8]"""
    return _unpack(words, 4).view(words.shape[0], -1, 8)[..., list(AWQ_ORDER)].flatten(1)


_CODES: Mapping[str, Callable[[QuantizedTensor, Parts], torch.Tensor]] = {
    "packed": lambda tensor, parts: _unpack(parts["codes"], tensor.bits),
    "awq": lambda tensor, parts: _awq(parts["codes"]).T.contiguous(),
    "gptq": lambda tensor, parts: _unpack(parts["codes"].T.contiguous(), tensor.bits),
}


def _scales_and_zeros(tensor: QuantizedTensor, parts: Parts) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [out, groups]"""
    scale = parts["scale"].float()
    if tensor.layout == "packed":
        if "zeros" not in parts:
            return scale, torch.full_like(scale, 1 << (tensor.bits - 1))
        zeros = _unpack(parts["zeros"].T.contiguous(), tensor.bits).T[: scale.shape[0]]
        return scale, zeros.float()
    packed = parts["zeros"]
    zeros = _awq(packed) if tensor.layout == "awq" else _unpack(packed, tensor.bits)
    return scale.T.contiguous(), zeros.T.float() + tensor.zero_offset
