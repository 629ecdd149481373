"""A decoder layer as a value: what it computes, without its weights. Pure: no IO, no torch.

Every layer is attention, then a gated MLP, each added to what came in. Layers differ in the fields below. A device
reads them to decide what it computes in one compiled call; all others are computed one operator after another.
"""

from dataclasses import dataclass
from typing import Literal

from common.checkpoint.rope import Rope

# Where a layer has an RMSNorm: on the input of attention or MLP, or on their output, before it is added.
NormPlace = Literal["before_attention", "after_attention", "before_mlp", "after_mlp"]
PRE_NORMS: tuple[NormPlace, ...] = ("before_attention", "before_mlp")
POST_NORMS: tuple[NormPlace, ...] = ("after_attention", "after_mlp")

# What the gate of the MLP goes through: x * sigmoid(x), or GELU in its tanh form.
Activation = Literal["silu", "gelu_tanh"]

# RMSNorm of q and k before RoPE: none, one weight for each head alike, or one over the whole projection.
QkNorm = Literal["none", "head", "full"]


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """How the scores of one layer are computed: the same for all its tokens."""

    scale: float
    window: int = 0  # a token sees itself and the window - 1 tokens before it; 0 = all of them
    soft_cap: float = 0.0  # scores become soft_cap * tanh(score / soft_cap); 0 = they stay

    @property
    def is_plain(self) -> bool:
        """Neither a window nor a soft cap."""
        return not self.window and not self.soft_cap


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int  # of the gated MLP: down(activation(gate(x)) * up(x))
    norm_eps: float
    rope: Rope
    attention: AttentionOptions
    norms: tuple[NormPlace, ...] = PRE_NORMS
    qk_norm: QkNorm = "none"
    qkv_bias: bool = False
    activation: Activation = "silu"

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def weights(self) -> dict[str, tuple[int, ...]]:
        """The shape of each part's weight. A bias, where there is one, has the weight's first dimension."""
        hidden, inner = self.hidden_size, self.intermediate_size
        return {
            "q": (self.q_size, hidden),
            "k": (self.kv_size, hidden),
            "v": (self.kv_size, hidden),
            "output": (hidden, self.q_size),
            "gate": (inner, hidden),
            "up": (inner, hidden),
            "down": (hidden, inner),
        } | self.norm_weights

    @property
    def norm_weights(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the norms among `weights`."""
        sizes = {"none": (), "head": (self.head_dim,) * 2, "full": (self.q_size, self.kv_size)}[self.qk_norm]
        of_qk = {f"{part}_norm": (size,) for part, size in zip("qk", sizes, strict=False)}
        places: dict[str, tuple[int, ...]] = {place: (self.hidden_size,) for place in self.norms}
        return places | of_qk

    @property
    def biases(self) -> tuple[str, ...]:
        """The parts that have a bias."""
        return ("q", "k", "v") if self.qkv_bias else ()
