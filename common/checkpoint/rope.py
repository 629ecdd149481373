"""Rotary embeddings as values: by which angles pairs of q and k turn, and how a model was made to read longer texts.

Pure: no IO, no torch.
"""

import math
from dataclasses import dataclass

BETA_FAST, BETA_SLOW = 32.0, 1.0  # YaRN's own


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's: low frequencies are divided by `factor`, a band in between is blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Position interpolation (Chen et al. 2023): every frequency is divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """NTK-aware scaling by length: past the original length the base grows with the position.

    A token keeps the angle that it had as the last one, so that its K does not hang on what follows. This is what
    transformers computes token by token; given a long prompt at once, it turns all of it by the prompt's length.
    """

    factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, section 3.2): pairs that turn more than `beta_fast` times within the original length
    stay, those that turn less than `beta_slow` times are divided by `factor`, a ramp lies between.

    q and k are each multiplied by `amplitude`.
    """

    factor: float
    original_max_position: int
    amplitude: float
    beta_fast: float = BETA_FAST
    beta_slow: float = BETA_SLOW
    is_truncated: bool = True  # the ends of the ramp are whole numbers of pairs


@dataclass(frozen=True, slots=True)
class DivisorScaling:
    """Each pair's frequency is divided by a number of its own; q and k are each multiplied by `amplitude`."""

    divisors: tuple[float, ...]  # [rotary size / 2]
    amplitude: float = 1.0


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """LongRoPE (Ding et al. 2024): one set of divisors for texts up to the original length, one for longer ones.

    Which of them is decided once, by the longest text that is served: cached K must not hang on what follows it.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_max_position: int
    amplitude: float

    def for_length(self, max_length: int) -> DivisorScaling:
        """The set for texts of up to `max_length` tokens."""
        is_long = max_length > self.original_max_position
        return DivisorScaling(self.long if is_long else self.short, self.amplitude)


RopeScaling = Llama3Scaling | LinearScaling | DynamicScaling | YarnScaling | DivisorScaling | LongRopeScaling


@dataclass(frozen=True, slots=True)
class Rope:
    """By which angles the pairs (i, i + size / 2) of q and k turn; the dimensions behind them stay."""

    theta: float
    scaling: RopeScaling | None = None
    size: int = 0  # 0 = the whole head
    is_interleaved: bool = False  # the pairs are (2 i, 2 i + 1) instead

    def places(self, head_dim: int) -> list[int]:
        """The dimensions of a head in the order in which they are computed: pairs are half a head apart.

        Scores do not change when q and k have their dimensions in another order.
        """
        size = self.size or head_dim
        left = list(range(size, head_dim))
        middle = len(left) // 2
        first, second = (
            (range(0, size, 2), range(1, size, 2))
            if self.is_interleaved
            else (
                range(size // 2),
                range(size // 2, size),
            )
        )
        return [*first, *left[:middle], *second, *left[middle:]]


def magnitude(factor: float, multiplier: float = 1.0) -> float:
    """By what YaRN multiplies q and k for a text that is `factor` times as long (Peng et al. 2023, section 3.3)."""
    return 0.1 * multiplier * math.log(factor) + 1.0 if factor > 1 else 1.0
