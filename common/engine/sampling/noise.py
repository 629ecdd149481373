"""Gumbel noise without a generator: an integer hash of (seed, choice, position, token id).

The key of a row is mixed in Python by SplitMix64 (Steele, Lea, Flood 2014); each token id is then hashed with it
in int32 tensor arithmetic by the "lowbias32" permutation (C. Wellons, 2018), which wraps alike on CPU and GPU.
"""

import torch

_MASK64 = (1 << 64) - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_TOKEN_STRIDE = -1640531535  # 0x9E3779B1 as int32: spreads neighbouring token ids
_MULTIPLIERS = (0x7FEB352D, -2073254261)  # lowbias32's second is 0x846CA68B
_NUM_BITS = 23  # of the uniform number: (integer + 0.5) / 2**23 is exact in float32


def gumbel(seed: int, choice_idx: int, position: int, token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise per token id (int32, any shape). float32, always finite: within about (-2.8, 16.7)."""
    return gumbel_of(hash_bits(seed, choice_idx, position, token_ids))


def gumbel_of(bits: torch.Tensor) -> torch.Tensor:
    """The noise that hashed bits (int32) stand for."""
    uniform = _shift_right(bits, 32 - _NUM_BITS).float().add_(0.5).mul_(2.0**-_NUM_BITS)
    return uniform.log_().neg_().log_().neg_()


def hash_bits(seed: int, choice_idx: int, position: int, token_ids: torch.Tensor) -> torch.Tensor:
    """32 hashed bits per token id, as int32."""
    return hash_with(*key_halves(seed, choice_idx, position), token_ids)


def key_halves(seed: int, choice_idx: int, position: int) -> tuple[int, int]:
    """Low and high half of a row's key as int32."""
    key = row_key(seed, choice_idx, position)
    return _int32(key), _int32(key >> 32)


def hash_with(low: int | torch.Tensor, high: int | torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """The bits of each token id under the key beside it (int32; a number counts for all)."""
    bits = token_ids * _TOKEN_STRIDE
    bits.add_(low)
    bits.bitwise_xor_(_shift_right(bits, 16)).mul_(_MULTIPLIERS[0])
    bits.bitwise_xor_(high)
    bits.bitwise_xor_(_shift_right(bits, 15)).mul_(_MULTIPLIERS[1])
    return bits.bitwise_xor_(_shift_right(bits, 16))


def row_key(seed: int, choice_idx: int, position: int) -> int:
    """64 mixed bits that name one draw."""
    key = 0
    for part in (seed, choice_idx, position):
        key = _mix64((key + (part & _MASK64) + _GOLDEN_GAMMA) & _MASK64)
    return key


def _mix64(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def _int32(bits: int) -> int:
    """The low 32 bits as a signed number, as torch wants them."""
    low = bits & 0xFFFFFFFF
    return low - (1 << 32) if low >= 1 << 31 else low


def _shift_right(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Logical shift: torch's int32 shift copies the sign."""
    return (bits >> count).bitwise_and_((1 << (32 - count)) - 1)
