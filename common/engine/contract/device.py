"""Everything that differs between a CPU and a GPU: `Device`, one object per device, made once.

Also the forms in which a model's weights meet it: `Linear`, `Mlp`, `ExpertMlp`, `Layer` and `Tail`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from common.checkpoint.layers import Activation, Experts, LayerSpec
from common.engine.contract.attention import AttentionBackend, AttentionBatch, LayerKV
from common.engine.contract.draws import DrawCandidates
from common.engine.contract.elementwise import Elementwise
from common.engine.contract.executor import LayerHook

# Runs the function once or more, and gives what repeats its work on the tensors that it read, and its result.
Capture = Callable[[Callable[[], torch.Tensor]], tuple[Callable[[], None], torch.Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """y = x @ weight.T + bias, as the device that made it laid the weight out."""

    in_features: int
    out_features: int
    apply: Callable[[torch.Tensor], torch.Tensor]  # [num_rows, in_features] -> [num_rows, out_features]
    packed: Any = None  # the device's own form of the weight, which its `compile` reads; None = it has none

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.apply(x)


@dataclass(frozen=True, slots=True, eq=False)
class Mlp:
    """down(activation(gate(x)) * up(x))"""

    gate_up: Linear  # gate first
    down: Linear


class ExpertWeights(NamedTuple):
    """Of one expert, as they were read."""

    gate_up: torch.Tensor  # [2 * size, hidden_size], gate first
    down: torch.Tensor  # [hidden_size, size]
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class GroupedMlp:
    """The MLPs of a layer's experts, as the device that made it laid them out."""

    # rows [num_rows, hidden_size], expert_ids [num_rows, num_active] int64, their weights, float32 of the same shape
    # -> [num_rows, hidden_size]: the weighted sum of what a row's experts make of it
    apply: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    packed: Any = None  # the device's own form of all weights, which its `compile` reads; None = it has none
    is_recordable: bool = True  # False: it waits for the choice and does what that needs, which no recording repeats


@dataclass(frozen=True, slots=True, eq=False)
class ExpertMlp:
    """A router, the experts that it chooses from, and the MLP for all tokens, where there is one."""

    router: Linear  # [hidden_size] -> a logit for each expert
    experts: GroupedMlp
    choice_bias: torch.Tensor | None = None  # [num_experts] float32, see `Routing`
    shared: Mlp | None = None
    shared_weight: Linear | None = None  # [hidden_size] -> the logit of how much the shared MLP counts; None = fully


@dataclass(frozen=True, slots=True, eq=False)
class LatentWeights:
    """What takes queries to the latents, and what was attended to of those back to the heads; see `Latent`."""

    query_up: Linear | None  # [query_rank] -> all queries; None = the first product makes them
    key_up: torch.Tensor  # [num_heads, key_size, rank]
    value_up: torch.Tensor  # [num_heads, rank, value_size]


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One decoder layer with its weights."""

    spec: LayerSpec
    cos_sin: torch.Tensor  # [max_position, head_dim] float32: cos in the first half, sin in the second
    norms: Mapping[str, torch.Tensor]  # by the names of `spec.norm_weights`
    qkv: Linear  # with latents: queries, or what they come from, and latents
    output: Linear
    mlp: Mlp | ExpertMlp
    sinks: torch.Tensor | None = None  # [num_heads] float32
    latent: LatentWeights | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Tail:
    """What makes logits of the last layer's output."""

    norm: torch.Tensor  # [hidden_size]
    norm_eps: float
    head: Linear
    logit_scale: float = 1.0  # multiplies the logits
    logit_soft_cap: float = 0.0  # logits become cap * tanh(logit / cap); 0 = they stay


class CompiledRun(Protocol):
    """Layers that follow one another, computed in one call."""

    @property
    def num_layers(self) -> int: ...

    @property
    def has_tail(self) -> bool:
        """Whether it computes final norm and head too, and returns logits [num_rows, vocab_size] float32."""
        ...

    def can_run(self, kv: LayerKV) -> bool:
        """Whether it knows such a cache; `kv` is one layer of it."""
        ...

    def forward(
        self,
        hidden: torch.Tensor,  # [num_tokens, hidden_size], overwritten
        batch: AttentionBatch,  # of all its layers
        kv: Sequence[LayerKV],  # of its layers
        rows: torch.Tensor | None,  # [num_rows] int64, ascending: what is wanted past the last attention; None = all
        layer_hook: LayerHook | None,  # called with the number of its own layers whose KV is written
    ) -> torch.Tensor:
        """The last layer's output [num_rows, hidden_size], or logits. With no row wanted it ends at the last KV."""
        ...


class Memory(Protocol):
    """The memory of a device that has its own, in bytes."""

    def total(self) -> int: ...

    def free(self) -> int:
        """What nobody has taken, other processes included."""
        ...

    def held(self) -> int:
        """What this process has taken for tensors, used or kept for reuse."""
        ...

    def peak_of(self, run: Callable[[], object]) -> int:
        """The most that this process's tensors take at once while it runs."""
        ...


class Device(Protocol):
    """Where a model is computed. Weights and activations are of `dtype` and lie at `place`."""

    @property
    def place(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def memory(self) -> Memory | None:
        """None where it is the machine's, which others need as well."""
        ...

    @property
    def attention(self) -> AttentionBackend: ...

    @property
    def elementwise(self) -> Elementwise: ...

    @property
    def draws(self) -> DrawCandidates | None:
        """What narrows draws down; None = the sampler computes the noise of whole rows."""
        ...

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, min_bits: int = 4) -> Linear:
        """Lay out a weight [out_features, in_features]. Raises CheckpointError where it cannot have the bits asked for.

        `min_bits`: what bears fewer bits badly keeps at least so many, whatever the quantization.
        """
        ...

    def grouped_mlp(self, experts: Experts, activation: Activation, weights: Iterable[ExpertWeights]) -> GroupedMlp:
        """Lay out one MLP after another."""
        ...

    def compile(self, layers: Sequence[Layer], tail: Tail) -> Mapping[int, CompiledRun]:
        """The runs of layers that it can compute in one call, by the number of their first layer. {} = none."""
        ...

    def tune(self, kv: LayerKV, num_heads: int, head_dim: int) -> None:
        """Choose kernels' tilings for one layer `kv` of the cache. Changes no result beyond rounding."""
        ...

    def new_capture(self) -> Capture | None:
        """What records whole steps, to be replayed in one launch; None where there is no such thing."""
        ...
