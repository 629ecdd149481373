"""A mixture of experts: the router's choice, and what the chosen experts make of each row."""

import torch

from common.checkpoint.layers import Routing
from common.engine.contract.device import Device, ExpertMlp


def choose(
    routing: Routing, logits: torch.Tensor, choice_bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [num_rows, num_experts] -> the experts of each row, [num_rows, num_active] int64, and their weights,
    float32."""
    wide = logits.float()
    scores = wide.softmax(-1) if routing.scores == "softmax" else wide.sigmoid()
    order = scores if choice_bias is None else scores + choice_bias
    if routing.num_groups > 1:
        order = _of_best_groups(routing, order)
    expert_ids = order.topk(routing.num_active, dim=-1).indices
    weights = scores.gather(1, expert_ids)
    if routing.is_normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return expert_ids, weights * routing.scale


def _of_best_groups(routing: Routing, scores: torch.Tensor) -> torch.Tensor:
    """-inf for the experts of all other groups."""
    grouped = scores.view(scores.shape[0], routing.num_groups, -1)
    of_groups = grouped.topk(routing.num_best_of_group, dim=-1).values.sum(-1)
    best = of_groups.topk(routing.num_active_groups, dim=-1).indices
    hidden = torch.ones(grouped.shape[:2], dtype=torch.bool, device=scores.device).scatter_(1, best, False)
    return grouped.masked_fill(hidden[..., None], float("-inf")).flatten(1)


def expert_mlp(mlp: ExpertMlp, routing: Routing, device: Device, x: torch.Tensor) -> torch.Tensor:
    """[num_rows, hidden_size] -> the same, of silu MLPs."""
    mixed = mlp.experts.apply(x, *choose(routing, mlp.router(x), mlp.choice_bias))
    if mlp.shared is None:
        return mixed
    shared = mlp.shared.down(device.elementwise.silu_mul(mlp.shared.gate_up(x)))
    if mlp.shared_weight is not None:
        shared = shared * mlp.shared_weight(x).sigmoid()
    return mixed.add_(shared)
