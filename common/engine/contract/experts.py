"""Experts one after another, in torch, for every device; and the order in which rows meet their experts."""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from common.checkpoint.layers import Activation
from common.engine.contract.device import GroupedMlp, Mlp
from common.engine.contract.elementwise import Elementwise, activate


class TorchExperts:
    """Multiplies the rows of each active expert by its weights: the cost grows with the active experts only."""

    def __init__(self, mlps: Sequence[Mlp], activate: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """`activate`: [num_rows, 2 * size], gate first -> [num_rows, size]"""
        self._mlps = mlps
        self._activate = activate

    def __call__(self, x: torch.Tensor, expert_ids: torch.Tensor, expert_weights: torch.Tensor) -> torch.Tensor:
        """As `GroupedMlp.apply`."""
        num_active = expert_ids.shape[1]
        order = expert_ids.flatten().argsort(stable=True)  # the pairs (row, expert), by expert
        counts = torch.bincount(expert_ids.flatten(), minlength=len(self._mlps)).tolist()
        results = x.new_empty((order.shape[0], x.shape[1]))
        for mlp, pairs in zip(self._mlps, torch.split_with_sizes(order, counts), strict=True):
            if pairs.shape[0]:
                results[pairs] = mlp.down(self._activate(mlp.gate_up(x[pairs // num_active])))
        weighted = results.view(-1, num_active, x.shape[1]).float() * expert_weights[..., None]
        return weighted.sum(1).to(x.dtype)


def torch_experts(mlps: Sequence[Mlp], elementwise: Elementwise, activation: Activation) -> GroupedMlp:
    """For what a device has no kernel of its own for."""
    return GroupedMlp(TorchExperts(mlps, partial(activate, elementwise, activation)), is_recordable=False)
