"""What can go wrong in a `HandoffWorld`, each kind as often as its budget says."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from kvtransfer.events import (
    AcknowledgedByPeer,
    ChunkAnnounced,
    ExpectationWithdrawn,
    PeerLost,
    TransferCancelRequested,
    TransferOutcome,
)
from tests.simkit.handoff_parts import new_receiver, new_sender, next_life, ref_of

if TYPE_CHECKING:
    from tests.simkit.handoff_world import HandoffWorld

MALFORMATIONS: dict[str, dict[str, int]] = {
    "length": {"num_bytes": 9},
    "layers": {"layer_start": 1, "layer_end": 3},
    "order": {"seq": 3},
    "twice": {"layer_start": 0, "layer_end": 1, "token_start": 0, "token_end": 1},
    "outside": {"token_start": 2, "token_end": 3},
}


class HandoffFaults:
    """`budget`: how often each kind may still happen."""

    def __init__(self, budget: dict[str, int]) -> None:
        self.budget = budget
        self.has_peer_lied = False

    def choices(self, world: "HandoffWorld") -> list[str]:
        return [
            f"!{kind} {target}".rstrip()
            for kind, left in self.budget.items()
            if left > 0
            for target in _TARGETS[kind](world)
        ]

    def apply(self, world: "HandoffWorld", choice: str) -> None:
        kind, _, target = choice.partition(" ")
        self.budget[kind] -= 1
        getattr(self, f"_{kind}")(world, target)

    def _break(self, world: "HandoffWorld", target: str) -> None:
        world.net.break_session(*world.net.session(int(target)))

    def _corrupt(self, world: "HandoffWorld", target: str) -> None:
        world.net.move(world, *world.net.session(int(target)), "not what the peer encrypted")

    def _freeze(self, world: "HandoffWorld", target: str) -> None:
        world.net.frozen = target

    def _cancel_prefill(self, world: "HandoffWorld", target: str) -> None:
        entry = world.tries[int(target)]
        world.to_sender(entry.pair.sender, TransferCancelRequested(entry.transfer_id, "client gone"))

    def _withdraw(self, world: "HandoffWorld", target: str) -> None:
        attempt_id = list(world.grants)[int(target)]
        world.to_receiver(world.grants[attempt_id].receiver, ExpectationWithdrawn(attempt_id, "client gone"))

    def _deadline(self, world: "HandoffWorld", _: str) -> None:
        world.pass_deadline()

    def _crash_sender(self, world: "HandoffWorld", name: str) -> None:
        """Its memory is gone; a new life starts at once and knows nothing."""
        del world.senders[name]
        for entry in world.tries:
            if entry.pair.sender == name and entry.outcome is None:
                entry.outcome = TransferOutcome.LINK_LOST
        world.senders[next_life(name)] = new_sender()
        world.net.kill(name, next_life(name))

    def _crash_receiver(self, world: "HandoffWorld", name: str) -> None:
        del world.receivers[name]
        for grant in world.grants.values():
            if grant.receiver == name:
                grant.end = "crashed"
        world.receivers[next_life(name)] = new_receiver()
        world.net.kill(name, next_life(name))

    def _lose_again(self, world: "HandoffWorld", _: str) -> None:
        """Both shells report the loss of a peer that neither core knows any more."""
        sender, receiver = next(iter(world.senders)), next(iter(world.receivers))
        world.to_sender(sender, PeerLost(ref_of(receiver), "again"))
        world.to_receiver(receiver, PeerLost(ref_of(sender), "again"))

    def _early_ack(self, world: "HandoffWorld", target: str) -> None:
        self.has_peer_lied = True
        _, session = world.net.session(int(target))
        session.down.append(AcknowledgedByPeer(world.tries[0].transfer_id))

    def _malform(self, world: "HandoffWorld", target: str) -> None:
        idx, how = target.split(":")
        _, session = world.net.session(int(idx))
        announced = session.up[0]
        assert isinstance(announced, ChunkAnnounced)
        session.is_malformed = True
        session.up[0] = replace(announced, chunk=replace(announced.chunk, **MALFORMATIONS[how]))


# ---- what each kind can hit ---------------------------------------------------------------------------


def _unbroken(world: "HandoffWorld") -> list[str]:
    return [str(idx) for idx, session in enumerate(world.net.sessions.values()) if not session.is_broken]


def _moving(world: "HandoffWorld") -> list[str]:
    sessions = list(world.net.sessions.values())
    return [idx for idx in _unbroken(world) if sessions[int(idx)].sent and sessions[int(idx)].posted]


def _ready(world: "HandoffWorld") -> list[str]:
    sessions = list(world.net.sessions.values())
    return [idx for idx in _unbroken(world) if sessions[int(idx)].is_sender_ready]


def _malformable(world: "HandoffWorld") -> list[str]:
    sessions = list(world.net.sessions.values())
    heads = [(idx, sessions[int(idx)].up[:1]) for idx in _unbroken(world)]
    return [
        f"{idx}:{how}" for idx, head in heads if head and isinstance(head[0], ChunkAnnounced) for how in MALFORMATIONS
    ]


_TARGETS: "dict[str, Callable[[HandoffWorld], list[str]]]" = {
    "break": _unbroken,
    "corrupt": lambda world: [] if world.net.frozen else _moving(world),
    "freeze": lambda world: [] if world.net.frozen else list(world.receivers),
    "cancel_prefill": lambda world: [
        str(idx) for idx, entry in enumerate(world.tries) if entry.pair.sender in world.senders
    ],
    "withdraw": lambda world: [str(idx) for idx, g in enumerate(world.grants.values()) if g.is_expected and not g.end],
    "deadline": lambda world: [""] if world.next_deadline_s() is not None else [],
    "crash_sender": lambda world: list(world.senders),
    "crash_receiver": lambda world: list(world.receivers),
    "lose_again": lambda world: [] if world.net.sessions else [""],
    "early_ack": _ready,
    "malform": _malformable,
}
