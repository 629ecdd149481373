"""Products of which each rank has a part: their results summed over the ranks, or put beside each other."""

from dataclasses import replace

import torch

from common.checkpoint import ModelSpec
from common.engine.contract.collectives import Collectives
from common.engine.contract.device import GroupedMlp, Linear
from common.engine.model.sharding import vocabulary_of_rank
from common.values.ranks import ranks_of


def summed(linear: Linear, collectives: Collectives | None) -> Linear:
    """Of a product that is split by its inputs: the whole product, on every rank. None: it is not split."""
    if collectives is None:
        return linear
    add_up = collectives.all_reduce

    def apply(x: torch.Tensor) -> torch.Tensor:
        return add_up(linear.apply(x))

    return Linear(linear.in_features, linear.out_features, apply)  # not packed: no compiled run may leave the sum out


def summed_experts(experts: GroupedMlp, collectives: Collectives | None) -> GroupedMlp:
    """Of experts that are each split by their inner size: their whole result, on every rank. None: not split."""
    if collectives is None:
        return experts
    add_up = collectives.all_reduce
    apply = experts.apply
    return replace(experts, apply=lambda x, expert_ids, weights: add_up(apply(x, expert_ids, weights)), packed=None)


def gathered(head: Linear, spec: ModelSpec, collectives: Collectives | None) -> Linear:
    """Of a head that is split by the vocabulary: all of it on rank 0, a rank's own part elsewhere."""
    if collectives is None:
        return head
    gather = collectives.gather
    sizes = [vocabulary_of_rank(spec, rank).size for rank in ranks_of(collectives.rank.world_size)]

    def apply(x: torch.Tensor) -> torch.Tensor:
        return gather(head.apply(x), sizes)

    return Linear(head.in_features, spec.vocab_size, apply)
