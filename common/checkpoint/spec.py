"""The shape of a model as values. Pure: no IO, no torch."""

from dataclasses import dataclass, replace

from common.checkpoint.layers import Experts, Latent
from common.checkpoint.rope import DivisorScaling, LongRopeScaling, Rope, RopeScaling


class CheckpointError(ValueError):
    """The model files are missing, damaged, or need something that pdserve does not offer. Names the file or field."""


MAX_LAYERS = 10_000  # beyond any model's; each costs memory before a weight is looked for


def within_layers(field: str, number: int) -> int:
    if number > MAX_LAYERS:
        raise CheckpointError(f"{field} is {number}, beyond any model's; {MAX_LAYERS} at most")
    return number


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything that the forward pass depends on besides the weights."""

    architecture: str  # a key of `families.FAMILIES`
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
    windows: tuple[int, ...] = ()  # per layer the tokens that one sees, itself included; 0 = all; () = all everywhere
    attention_soft_cap: float = 0.0  # attention scores become cap * tanh(score / cap); 0 = they stay
    window_rope: Rope | None = None  # of the layers with a window; None = that of all
    attention_scale: float | None = None  # of the scores; None = head_dim ** -0.5
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_soft_cap: float = 0.0  # logits become cap * tanh(logit / cap); 0 = they stay
    has_head_norms: bool = False  # of q and k, in a family that has them or not
    attention_bias: bool = False  # of q, k, v and the output projection
    mlp_bias: bool = False
    rotary_size: int = 0  # the leading dimensions of a head that RoPE turns; 0 = all
    has_interleaved_rope: bool = False
    latent: Latent | None = None
    num_drafting_layers: int = 0  # behind the last layer, for speculation: not read
    experts: Experts | None = None
    dense_layers: frozenset[int] = frozenset()  # those that have the one MLP nevertheless

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise CheckpointError(f"{self.num_heads} query heads cannot share {self.num_kv_heads} KV heads")
        if self.head_dim % 2:
            raise CheckpointError(f"head_dim must be even for RoPE, got {self.head_dim}")
        for size in _divisor_counts(self.rope_scaling):
            if size != self.num_pairs:
                raise CheckpointError(f"{size} factors of RoPE do not fit the {self.num_pairs} pairs of a head")
        if self.rotary_size % 2 or self.rotary_size > self.head_dim:
            raise CheckpointError(f"RoPE cannot turn {self.rotary_size} of {self.head_dim} dimensions of a head")

    @property
    def num_pairs(self) -> int:
        """Of a head, that RoPE turns."""
        return (self.rotary_size or self.head_dim) // 2

    def for_length(self, max_length: int) -> "ModelSpec":
        """The same model, serving texts of up to `max_length` tokens: what hangs on that is decided."""
        length = min(max_length, self.max_position)
        scaling = self.rope_scaling
        decided = scaling.for_length(length) if isinstance(scaling, LongRopeScaling) else scaling
        return replace(self, max_position=length, rope_scaling=decided)


def _divisor_counts(scaling: RopeScaling | None) -> tuple[int, ...]:
    if isinstance(scaling, LongRopeScaling):
        return len(scaling.short), len(scaling.long)
    return (len(scaling.divisors),) if isinstance(scaling, DivisorScaling) else ()
