"""A mixture of experts: the router's choice, and what the chosen experts make of each row."""

import torch

from common.checkpoint.layers import Routing
from common.engine.contract.device import Device, ExpertMlp


def choose(routing: Routing, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [num_rows, num_experts] -> the experts of each row, [num_rows, num_active] int64, and their weights,
    float32."""
    wide = logits.float()
    scores = wide.softmax(-1) if routing.scores == "softmax" else wide.sigmoid()
    weights, expert_ids = scores.topk(routing.num_active, dim=-1)
    if routing.is_normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    return expert_ids, weights * routing.scale


def expert_mlp(mlp: ExpertMlp, routing: Routing, device: Device, x: torch.Tensor) -> torch.Tensor:
    """[num_rows, hidden_size] -> the same, of silu MLPs."""
    mixed = mlp.experts.apply(x, *choose(routing, mlp.router(x)))
    if mlp.shared is None:
        return mixed
    shared = mlp.shared.down(device.elementwise.silu_mul(mlp.shared.gate_up(x)))
    if mlp.shared_weight is not None:
        shared = shared * mlp.shared_weight(x).sigmoid()
    return mixed.add_(shared)
