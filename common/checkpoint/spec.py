"""The shape of a model as values. Pure: no IO, no torch."""

from dataclasses import dataclass


class CheckpointError(ValueError):
    """The model files are missing, damaged, or need something that pdserve does not offer. Names the file or field."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3.1's frequency scaling: low frequencies are divided by `factor`, a band in between is blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything that the forward pass depends on besides the weights."""

    architecture: str  # "llama", "qwen2", "qwen3"
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    rms_norm_eps: float
    tie_embeddings: bool
    attention_bias: bool = False  # on q, k and v
    qk_norm: bool = False  # RMSNorm of each q and k head before RoPE
    windows: tuple[int, ...] = ()  # per layer the tokens that one sees, itself included; 0 = all; () = all everywhere
    attention_soft_cap: float = 0.0  # attention scores become cap * tanh(score / cap); 0 = they stay

    @property
    def has_plain_attention(self) -> bool:
        """No layer has a window or a soft cap."""
        return not any(self.windows) and not self.attention_soft_cap

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise CheckpointError(f"{self.num_heads} query heads cannot share {self.num_kv_heads} KV heads")
        if self.head_dim % 2:
            raise CheckpointError(f"head_dim must be even for RoPE, got {self.head_dim}")

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim
