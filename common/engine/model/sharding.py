"""Which part of each weight a rank holds. Pure: no torch.

Query heads stay with the KV head that they share, so ranks split KV heads; of fewer KV heads than ranks each is held by
several, and those split its query heads. The inner size of the MLP, and of every expert, is split in like pieces. The
projections back to the hidden size are split by their inputs, so that the sum over ranks is their output. The head is
split by the vocabulary. Embedding, norms and routers are whole everywhere. Nothing has to divide evenly.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd

from common.checkpoint import CheckpointError, ModelSpec
from common.checkpoint.families import family_of, layers_of
from common.checkpoint.layers import Latent, LayerSpec
from common.values.ranks import Rank, ranks_of

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# The MLP is cut at multiples of it where they divide its size: quantized formats and vector units like such rows.
INNER_UNIT = 32
_MLPS = ("", "shared_", "expert_")
_WHOLE = frozenset({"router", "shared_weight", "choice_bias", "q_down", "latent"})


@dataclass(frozen=True, slots=True)
class Cut:
    """[start, stop) of one axis of a stored weight: 0 = its outputs, 1 = its inputs."""

    axis: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def layer_of_rank(layer: LayerSpec, rank: Rank) -> LayerSpec:
    """The layer with this rank's heads and its piece of the MLP alone. Raises CheckpointError, see `check_split`."""
    if rank.world_size == 1:
        return layer
    experts = layer.experts
    if experts is not None:
        inner, shared = (len(_inner(size, rank)) for size in (experts.intermediate_size, experts.shared_size))
        experts = replace(experts, intermediate_size=inner, shared_size=shared)
    return replace(
        layer,
        num_heads=len(_query_heads(layer, rank)),
        num_kv_heads=len(rank.held(layer.num_kv_heads)),
        intermediate_size=len(_inner(layer.intermediate_size, rank)),
        experts=experts,
    )


def cuts_of(spec: ModelSpec, rank: Rank) -> Mapping[str, Cut]:
    """What this rank reads of the tensors that it does not hold whole, by Hugging Face name. Raises CheckpointError."""
    if rank.world_size == 1:
        return {}
    names, cuts = family_of(spec).names, {HEAD: vocabulary_of_rank(spec, rank)}
    for idx, layer in enumerate(layers_of(spec)):
        num_experts = layer.experts.routing.num_experts if layer.experts is not None else 0
        for part, cut in _cuts_of_layer(layer, rank).items():
            stem = f"model.layers.{idx}.{names[part]}"
            cuts |= {f"{stem.format(expert)}.weight": cut for expert in range(num_experts or 1)}
            if part in layer.biases:
                cuts[f"{stem}.bias"] = cut
    return cuts


def vocabulary_of_rank(spec: ModelSpec, rank: Rank) -> Cut:
    """The rows of the head."""
    held = rank.held(spec.vocab_size)
    return Cut(0, held.start, held.stop)


def check_split(spec: ModelSpec, world_size: int) -> None:
    """Raises CheckpointError, which says why, when so many ranks cannot share the model."""
    for rank in ranks_of(world_size):
        cuts_of(spec, rank)


def _cuts_of_layer(layer: LayerSpec, rank: Rank) -> dict[str, Cut]:
    if layer.qk_norm == "full":
        raise CheckpointError("q and k are normalized over all heads, which ranks that split the heads cannot do")
    cuts = _cuts_of_heads(layer, rank) if layer.latent is None else _cuts_over_latents(layer, layer.latent, rank)
    for mlp in _MLPS:
        cuts |= _cuts_of_mlp(mlp, layer, rank)
    if unknown := layer.weights.keys() - layer.norm_weights.keys() - cuts.keys() - _WHOLE:
        raise CheckpointError(f"ranks cannot split {', '.join(sorted(unknown))}")
    if summed := {part for part in layer.biases if part in cuts and cuts[part].axis == 1}:
        raise CheckpointError(f"the bias of {', '.join(sorted(summed))} would be added once for each rank")
    return cuts


def _cuts_of_heads(layer: LayerSpec, rank: Rank) -> dict[str, Cut]:
    q, kv, size = _query_heads(layer, rank), rank.held(layer.num_kv_heads), layer.head_dim
    queries, keys = (q.start * size, q.stop * size), (kv.start * size, kv.stop * size)
    cuts = {part: Cut(0, *at) for part, at in (("q", queries), ("k", keys), ("v", keys))}
    return cuts | {"output": Cut(1, *queries)}


def _cuts_over_latents(layer: LayerSpec, latent: Latent, rank: Rank) -> dict[str, Cut]:
    """Latents are whole everywhere; what makes heads of them is not."""
    heads, key = _query_heads(layer, rank), latent.key_size
    sizes = {"q_up" if latent.query_rank else "q": key + layer.head_dim, "latent_up": key + latent.value_size}
    cuts = {part: Cut(0, heads.start * size, heads.stop * size) for part, size in sizes.items()}
    return cuts | {"output": Cut(1, heads.start * latent.value_size, heads.stop * latent.value_size)}


def _cuts_of_mlp(prefix: str, layer: LayerSpec, rank: Rank) -> dict[str, Cut]:
    """{} where the layer has no such MLP."""
    shapes = layer.weights | layer.expert_weights
    if f"{prefix}down" not in shapes:
        return {}
    inner = _inner(shapes[f"{prefix}down"][1], rank)
    axes = {"gate": 0, "up": 0, "down": 1}
    return {f"{prefix}{part}": Cut(axis, inner.start, inner.stop) for part, axis in axes.items()}


def _query_heads(layer: LayerSpec, rank: Rank) -> range:
    """Those of its KV heads, or this rank's piece of those of the one KV head that it has with others."""
    held, per_kv_head = rank.held(layer.num_kv_heads), layer.num_heads // layer.num_kv_heads
    first = held.start * per_kv_head
    sharing = [other.rank for other in ranks_of(rank.world_size) if other.held(layer.num_kv_heads) == held]
    if len(sharing) == 1:
        return range(first, held.stop * per_kv_head)
    if len(sharing) > per_kv_head:
        raise CheckpointError(f"{layer.num_heads} query heads are too few for {rank.world_size} ranks")
    mine = Rank(sharing.index(rank.rank), len(sharing)).held(per_kv_head)
    return range(first + mine.start, first + mine.stop)


def _inner(size: int, rank: Rank) -> range:
    """This rank's piece of an MLP's inner size; 0 is that of an MLP that is not there."""
    if size < rank.world_size:
        if size:
            raise CheckpointError(f"an MLP of {size} is too small for {rank.world_size} ranks")
        return range(0)
    unit = gcd(size, INNER_UNIT)
    unit = unit if size // unit >= rank.world_size else 1
    held = rank.held(size // unit)
    return range(held.start * unit, held.stop * unit)
