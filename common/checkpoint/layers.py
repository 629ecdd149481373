"""A decoder layer as a value: what it computes, without its weights. Pure: no IO, no torch.

Every layer is attention, then a gated MLP or several of which a router chooses, each added to what came in. Layers
differ in the fields below. A device reads them to decide what it computes in one compiled call; all others are
computed one operator after another.
"""

from dataclasses import dataclass
from typing import Literal

from common.checkpoint.rope import Rope

# Where a layer has an RMSNorm: on the input of attention or MLP, or on their output, before it is added.
NormPlace = Literal["before_attention", "after_attention", "before_mlp", "after_mlp"]
PRE_NORMS: tuple[NormPlace, ...] = ("before_attention", "before_mlp")
POST_NORMS: tuple[NormPlace, ...] = ("after_attention", "after_mlp")

# What the gate of the MLP goes through: x * sigmoid(x), or GELU in its tanh form; clamped: gpt-oss's,
# both clamped, gate * sigmoid(1.702 * gate) * (up + 1).
Activation = Literal["silu", "gelu_tanh", "clamped"]

CLAMP, CLAMPED_SLOPE = 7.0, 1.702

# RMSNorm of q and k before RoPE: none, one weight for each head alike, or one over the whole projection.
QkNorm = Literal["none", "head", "full"]


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """How the scores of one layer are computed: the same for all its tokens."""

    scale: float
    window: int = 0  # a token sees itself and the window - 1 tokens before it; 0 = all of them
    soft_cap: float = 0.0  # scores become soft_cap * tanh(score / soft_cap); 0 = they stay
    # Keys are latents, one row for all heads, and so many first numbers of it are the value; 0 = keys and values apart.
    latent_rank: int = 0

    @property
    def is_plain(self) -> bool:
        """Neither a window nor a soft cap, over keys and values."""
        return not self.window and not self.soft_cap and not self.latent_rank


@dataclass(frozen=True, slots=True)
class Latent:
    """In place of keys and values: one row for all heads, of which each head's are products (DeepSeek-V2, 2024, 2.1).

    The row is `rank` normalized numbers, then the `head_dim` of the layer, which RoPE turns: a part of the keys.
    Attention never makes those products: queries are taken to the latents instead, and what was attended to back.
    """

    rank: int
    key_size: int  # of each head's key, without the part that RoPE turns
    value_size: int
    query_rank: int = 0  # queries come from the hidden size through so many normalized numbers; 0 = straight


@dataclass(frozen=True, slots=True)
class Routing:
    """Which experts a token goes through and how much each counts, by the router's logits, one for each expert.

    With softmax, dividing the weights of the chosen by their sum is the softmax over the chosen logits alone.
    """

    num_experts: int
    num_active: int  # experts of each token
    scores: Literal["softmax", "sigmoid"] = "softmax"  # of the logits, in float32
    is_normalized: bool = False  # the weights of the chosen are divided by their sum
    scale: float = 1.0  # multiplies the weights
    has_choice_bias: bool = False  # added to the scores to choose by, not to the weights (DeepSeek-V3)
    # Only experts of the best groups are chosen; a group is as good as its best few experts together.
    num_groups: int = 1
    num_active_groups: int = 1
    num_best_of_group: int = 2


@dataclass(frozen=True, slots=True)
class Experts:
    """In place of one MLP: several, of which each token goes through a few, and one for all tokens beside them."""

    routing: Routing
    intermediate_size: int  # of each expert
    shared_size: int = 0  # of the MLP for all tokens; 0 = there is none
    is_interleaved: bool = False  # gate and up of an expert are the even and the odd rows of one weight
    has_biases: bool = False  # of the router and of every expert
    has_shared_gate: bool = False  # its result is multiplied by the sigmoid of one more logit

    @property
    def is_shared(self) -> bool:
        return self.shared_size > 0


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # with latents only what RoPE turns
    intermediate_size: int  # of the gated MLP: down(activation(gate(x)) * up(x))
    norm_eps: float
    rope: Rope
    attention: AttentionOptions
    norms: tuple[NormPlace, ...] = PRE_NORMS
    qk_norm: QkNorm = "none"
    qkv_bias: bool = False
    output_bias: bool = False  # of the output projection
    mlp_bias: bool = False  # of gate, up and down
    residual_scale: float = 1.0  # multiplies what attention and MLP give before it is added
    activation: Activation = "silu"
    experts: Experts | None = None  # None = the one MLP
    has_sinks: bool = False  # each head has a score more, of nothing, that takes its part of the softmax
    latent: Latent | None = None  # None = keys and values

    @property
    def q_size(self) -> int:
        return self.num_heads * (self.head_dim + (self.latent.key_size if self.latent is not None else 0))

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def weights(self) -> dict[str, tuple[int, ...]]:
        """The shape of each part's weight. A bias, where there is one, has the weight's first dimension."""
        hidden = self.hidden_size
        attention: dict[str, tuple[int, ...]] = {
            "q": (self.q_size, hidden),
            "k": (self.kv_size, hidden),
            "v": (self.kv_size, hidden),
            "output": (hidden, self.q_size),
        }
        if self.latent is not None:
            attention = self._latent_weights(self.latent)
        sinks = {"sinks": (self.num_heads,)} if self.has_sinks else {}
        return attention | sinks | self._mlp_weights | self.norm_weights

    def _latent_weights(self, latent: Latent) -> dict[str, tuple[int, ...]]:
        hidden, rank = self.hidden_size, latent.query_rank
        return {
            **({"q_down": (rank, hidden), "q_up": (self.q_size, rank)} if rank else {"q": (self.q_size, hidden)}),
            "latent": (latent.rank + self.head_dim, hidden),
            "latent_up": (self.num_heads * (latent.key_size + latent.value_size), latent.rank),  # key first
            "output": (hidden, self.num_heads * latent.value_size),
        }

    @property
    def _mlp_weights(self) -> dict[str, tuple[int, ...]]:
        hidden, experts = self.hidden_size, self.experts
        if experts is None:
            return _gated_mlp("", hidden, self.intermediate_size)
        router: dict[str, tuple[int, ...]] = {"router": (experts.routing.num_experts, hidden)}
        if experts.routing.has_choice_bias:
            router |= {"choice_bias": (experts.routing.num_experts,)}
        shared = _gated_mlp("shared_", hidden, experts.shared_size) if experts.is_shared else {}
        return router | shared | ({"shared_weight": (1, hidden)} if experts.has_shared_gate else {})

    @property
    def expert_weights(self) -> dict[str, tuple[int, ...]]:
        """The shape of each part of one expert, which `weights` does not hold; {} without experts."""
        if self.experts is None:
            return {}
        hidden, inner = self.hidden_size, self.experts.intermediate_size
        if self.experts.is_interleaved:
            return {"expert_gate_up": (2 * inner, hidden), "expert_down": (hidden, inner)}
        return _gated_mlp("expert_", hidden, inner)

    @property
    def norm_weights(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the norms among `weights`."""
        sizes = {"none": (), "head": (self.head_dim,) * 2, "full": (self.q_size, self.kv_size)}[self.qk_norm]
        of_qk = {f"{part}_norm": (size,) for part, size in zip("qk", sizes, strict=False)}
        places: dict[str, tuple[int, ...]] = {place: (self.hidden_size,) for place in self.norms}
        if self.latent is not None:
            places |= {"latent_norm": (self.latent.rank,)}
            places |= {"q_down_norm": (self.latent.query_rank,)} if self.latent.query_rank else {}
        return places | of_qk

    @property
    def biases(self) -> tuple[str, ...]:
        """The parts that have a bias."""
        qkv = ("q", "k", "v") if self.qkv_bias else ()
        output = ("output",) if self.output_bias else ()
        router = ("router",) if self.experts is not None and self.experts.has_biases else ()
        return (*qkv, *output, *router, *(("gate", "up", "down") if self.mlp_bias else ()))


def _gated_mlp(prefix: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {f"{prefix}gate": (inner, hidden), f"{prefix}up": (inner, hidden), f"{prefix}down": (hidden, inner)}
