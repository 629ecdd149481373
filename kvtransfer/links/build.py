"""Chooses the link by the transport's name. The only place that knows which transports exist."""

from dataclasses import dataclass

import torch

from common.values.ranks import WHOLE, Rank
from kvtransfer.links.gloo import build_gloo_link
from kvtransfer.links.nccl import build_nccl_link
from kvtransfer.links.process_group import ProcessGroupLink
from kvtransfer.links.rendezvous import join_rendezvous


@dataclass(frozen=True, slots=True)
class LinkPlan:
    """One end of a link from one rank of a sender to one of a receiver. Both ends name the same store and prefix."""

    transport: str
    store_host: str
    store_port: int
    prefix: str
    end: int  # SENDER_END or RECEIVER_END
    host: str  # where this end listens, if its transport listens
    device: torch.device
    timeout_s: float
    sender: Rank = WHOLE
    receiver: Rank = WHOLE


def build_link(plan: LinkPlan) -> ProcessGroupLink:
    """Blocks until the peer builds its end; raises RuntimeError when it does not within the timeout.

    Raises ValueError for a link of a worker of several ranks: a pair of workers has one link today.
    """
    for side, rank in (("sender", plan.sender), ("receiver", plan.receiver)):
        if rank != WHOLE:
            raise ValueError(f"no link for a {side} of {rank.world_size} ranks")
    store = join_rendezvous(plan.store_host, plan.store_port, plan.prefix, plan.timeout_s)
    name = f"link-{plan.prefix}"
    if plan.transport == "gloo":
        return build_gloo_link(store, plan.end, plan.host, plan.timeout_s, name)
    if plan.transport == "nccl":
        return build_nccl_link(store, plan.end, plan.device, plan.timeout_s, name)
    raise ValueError(f"unknown transport {plan.transport!r}")


def accepts_shorter(transport: str) -> bool:
    """Whether a receive may be posted longer than the message: then one that is too long is survived and seen."""
    return transport == "gloo"
