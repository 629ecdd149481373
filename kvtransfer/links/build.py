"""Builds the link of a transport, and knows which transports of two ends go together."""

from dataclasses import dataclass

import torch

from common.values.ranks import WHOLE, Rank
from kvtransfer.links.gloo import SENDER_END, build_gloo_link
from kvtransfer.links.meeting import RING_BYTES, Meeting, MeetingPoint
from kvtransfer.links.nccl import build_nccl_link
from kvtransfer.links.process_group import ProcessGroupLink
from kvtransfer.links.rendezvous import join_rendezvous
from kvtransfer.links.sealed_store import SealedStore
from kvtransfer.links.shm import build_shm_link

# What a setting may become. In each, the first is what is wanted.
_KINDS = {"auto": ("shm", "gloo"), "shm": ("shm",), "gloo": ("gloo",), "nccl": ("nccl",)}


@dataclass(frozen=True, slots=True)
class LinkPlan:
    """One end of a link from one rank of a sender to one of a receiver. Both ends name the same store and prefix.

    `transport` is what both ends have agreed on. shm needs no store, but what the two ends have met with.
    """

    transport: str
    store_host: str
    store_port: int
    prefix: str
    end: int  # SENDER_END or RECEIVER_END
    host: str  # where this end listens, if its transport listens
    device: torch.device
    timeout_s: float
    secret: bytes  # what the control stream has told the two ends alone
    sender: Rank = WHOLE
    receiver: Rank = WHOLE
    meeting: Meeting | MeetingPoint | None = None


def build_link(plan: LinkPlan) -> ProcessGroupLink:
    """Blocks until the peer builds its end; raises RuntimeError when it does not within the timeout.

    Raises ValueError for a link of a worker of several ranks: a pair of workers has one link today.
    """
    for side, rank in (("sender", plan.sender), ("receiver", plan.receiver)):
        if rank != WHOLE:
            raise ValueError(f"no link for a {side} of {rank.world_size} ranks")
    name = f"link-{plan.prefix}"
    if plan.transport == "shm":
        return _build_shm(plan, name)
    if plan.transport == "gloo":
        return build_gloo_link(_join_sealed(plan), _join_sealed(plan), plan.end, plan.host, plan.timeout_s, name)
    if plan.transport == "nccl":
        store = join_rendezvous(plan.store_host, plan.store_port, plan.prefix, plan.timeout_s)
        return build_nccl_link(store, plan.end, plan.device, plan.timeout_s, name)
    raise ValueError(f"unknown transport {plan.transport!r}")


def _join_sealed(plan: LinkPlan) -> SealedStore:
    store = join_rendezvous(plan.store_host, plan.store_port, plan.prefix, plan.timeout_s)
    return SealedStore(store, plan.prefix, plan.secret)


def _build_shm(plan: LinkPlan, name: str) -> ProcessGroupLink:
    assert plan.meeting is not None, "shm without a meeting"
    meeting = plan.meeting.accept(plan.timeout_s) if isinstance(plan.meeting, MeetingPoint) else plan.meeting
    return build_shm_link(meeting, is_sender=plan.end == SENDER_END, timeout_s=plan.timeout_s, name=name)


def common_kinds(here: str, there: str) -> tuple[str, ...]:
    """Which links the two settings both allow, the wanted one first; none when they contradict each other."""
    return tuple(kind for kind in _KINDS.get(here, ()) if kind in _KINDS.get(there, ()))


def accepts_shorter(transport: str) -> bool:
    """Whether a receive may be posted longer than the message: then one that is too long is survived and seen."""
    return transport != "nccl"


def held_bytes(transport: str) -> int:
    """What may lie in the link itself: sent, and not received. gloo and NCCL end a send when the peer takes it."""
    return RING_BYTES if transport == "shm" else 0
