"""Sessions between the handoff cores of several processes, one small action at a time, for worlds that are explored.

The truths of the real transport: control messages keep their order and are never doubled; a send completes only when
its receive is posted; when a session dies each side hears it in its own time, what was under way is lost, and the
sender hears it only after its packs have ended. What bytes a chunk holds is the world's business.
"""

from collections.abc import Iterable
from typing import Protocol

from common.values.ids import TransferId
from kvtransfer.events import (
    ChunkPacked,
    ChunkReceived,
    ChunkSent,
    ChunkWritten,
    ConnectPeer,
    DiscardChunk,
    DropPeer,
    PeerLost,
    PeerReady,
    PostReceive,
    ReceiverEvent,
    SendAcknowledged,
    SendCancel,
    SendChunk,
    SenderEvent,
    SendFinished,
    WriteChunk,
)
from tests.simkit.handoff_parts import Pair, Session, message_down, message_up, name_of, ref_of
from tests.simkit.layered_engine import Payload


class Ends(Protocol):
    """The processes that the sessions join, by the name of their life."""

    def to_sender(self, name: str, event: SenderEvent) -> None: ...

    def to_receiver(self, name: str, event: ReceiverEvent) -> None: ...

    def read_chunk(self, name: str, effect: SendChunk) -> Payload: ...

    def write_chunk(self, name: str, effect: WriteChunk, payload: Payload) -> None: ...


class HandoffNet:
    """Owns all sessions, what is staged at receivers, and the writes that are under way."""

    def __init__(self, names: Iterable[str]) -> None:
        self.living = list(names)
        self.frozen: str | None = None
        self.sessions: dict[Pair, Session] = {}
        self.writing: list[tuple[str, WriteChunk]] = []
        self.staged: dict[tuple[Pair, TransferId, int], Payload] = {}

    # ---- what may happen ----------------------------------------------------------------------------

    def choices(self) -> list[str]:
        choices = [
            f"{action} {idx}"
            for idx, (pair, session) in enumerate(self.sessions.items())
            for action in self._session_actions(pair, session)
        ]
        return choices + (["write 0"] if self.writing and self.writing[0][0] != self.frozen else [])

    def _session_actions(self, pair: Pair, session: Session) -> list[str]:
        is_awake = pair.receiver != self.frozen
        actions = ["pack"] if session.packing else []
        actions += ["know"] if session.taken else []
        if session.is_predecessor_known and is_awake:
            actions.append("receiver_hears_old_loss")
        if session.is_broken:
            actions += [] if session.is_sender_done else ["sender_hears_loss"]
            return actions + (["receiver_hears_loss"] if session.is_known and is_awake else [])
        actions += ["ready"] if session.is_known and not session.is_sender_ready else []
        actions += ["down"] if session.down and session.is_sender_ready else []
        if is_awake:
            actions += [] if session.is_known else ["connect"]
            actions += ["up"] if session.up else []
            actions += ["move"] if session.sent and session.posted else []
        return actions

    def apply(self, ends: Ends, choice: str) -> None:
        action, _, idx = choice.partition(" ")
        if action == "write":
            self._write(ends)
            return
        pair, session = self.session(int(idx))
        getattr(self, f"_{action}")(ends, pair, session)

    def session(self, idx: int) -> tuple[Pair, Session]:
        return list(self.sessions.items())[idx]

    # ---- letting it happen --------------------------------------------------------------------------

    def _connect(self, ends: Ends, pair: Pair, session: Session) -> None:
        if session.is_predecessor_known:  # the shell ends a peer's old session before it takes a new one
            self._receiver_hears_old_loss(ends, pair, session)
        session.is_known = True
        ends.to_receiver(pair.receiver, PeerReady(ref_of(pair.sender)))

    def _ready(self, ends: Ends, pair: Pair, session: Session) -> None:
        session.is_sender_ready = True
        ends.to_sender(pair.sender, PeerReady(ref_of(pair.receiver)))

    def _pack(self, ends: Ends, pair: Pair, session: Session) -> None:
        effect = session.packing.pop(0)
        payload = ends.read_chunk(pair.sender, effect)
        if not session.is_broken:
            session.sent.append((effect, payload))
        ends.to_sender(pair.sender, ChunkPacked(effect.transfer_id, effect.chunk.seq))

    def _know(self, ends: Ends, pair: Pair, session: Session) -> None:
        effect = session.taken.pop(0)
        ends.to_sender(pair.sender, ChunkSent(effect.transfer_id, effect.chunk.seq))

    def _up(self, ends: Ends, pair: Pair, session: Session) -> None:
        ends.to_receiver(pair.receiver, session.up.pop(0))

    def _down(self, ends: Ends, pair: Pair, session: Session) -> None:
        ends.to_sender(pair.sender, session.down.pop(0))

    def _move(self, ends: Ends, pair: Pair, session: Session) -> None:
        self.move(ends, pair, session, None)

    def move(self, ends: Ends, pair: Pair, session: Session, error: str | None) -> None:
        """One chunk crosses the link into the receive that was posted for it."""
        (sent, payload), posted = session.sent.pop(0), session.posted.pop(0)
        if (sent.transfer_id, sent.chunk) != (posted.transfer_id, posted.chunk):
            assert session.is_malformed, "the link is out of step"
            error = "the header is of another chunk"
        session.taken.append(sent)
        self.staged[(pair, posted.transfer_id, posted.chunk.seq)] = payload
        ends.to_receiver(pair.receiver, ChunkReceived(ref_of(pair.sender), posted.transfer_id, posted.chunk.seq, error))

    def _write(self, ends: Ends) -> None:
        receiver, effect = self.writing.pop(0)
        key = Pair(name_of(effect.peer), receiver), effect.transfer_id, effect.chunk.seq
        ends.write_chunk(receiver, effect, self.staged.pop(key))
        ends.to_receiver(receiver, ChunkWritten(effect.transfer_id, effect.chunk.seq))

    def _sender_hears_loss(self, ends: Ends, pair: Pair, session: Session) -> None:
        session.packing.clear()
        session.taken.clear()
        session.is_sender_done = True
        self._forget_if_over(pair, session)
        ends.to_sender(pair.sender, PeerLost(ref_of(pair.receiver), "broken"))

    def _receiver_hears_loss(self, ends: Ends, pair: Pair, session: Session) -> None:
        session.posted.clear()
        session.is_known = False
        self._forget_if_over(pair, session)
        ends.to_receiver(pair.receiver, PeerLost(ref_of(pair.sender), "broken"))

    def _receiver_hears_old_loss(self, ends: Ends, pair: Pair, session: Session) -> None:
        session.is_predecessor_known = False
        ends.to_receiver(pair.receiver, PeerLost(ref_of(pair.sender), "broken"))

    def break_session(self, pair: Pair, session: Session) -> None:
        """What was under way is lost; a pack that runs ends, and what was taken before is reported before the loss."""
        session.is_broken = True
        session.up, session.down, session.sent = [], [], []
        if pair.sender not in self.living:
            session.is_sender_done = True
            session.packing, session.taken = [], []
        if pair.receiver not in self.living:
            session.is_known = session.is_predecessor_known = False
            session.posted = []
        self._forget_if_over(pair, session)

    def kill(self, name: str, successor: str) -> None:
        """A process dies with all it knew; its next life has a name of its own."""
        self.living[self.living.index(name)] = successor
        self.writing = [(receiver, effect) for receiver, effect in self.writing if receiver != name]
        self.staged = {key: payload for key, payload in self.staged.items() if key[0].receiver != name}
        for pair, session in list(self.sessions.items()):
            if name in pair:
                self.break_session(pair, session)

    # ---- performing effects -------------------------------------------------------------------------

    def perform_sender(self, name: str, effect: ConnectPeer | SendChunk | SendFinished | SendCancel | DropPeer) -> None:
        pair = Pair(name, name_of(effect.peer))
        session = self.sessions.get(pair)
        if isinstance(effect, ConnectPeer):
            self._open(pair, session)
        elif session is None:
            return
        elif isinstance(effect, DropPeer):
            self.break_session(pair, session)
        else:
            session.packing += [effect] if isinstance(effect, SendChunk) else []
            session.up += [] if session.is_broken else [message_up(ref_of(name), effect)]

    def _open(self, pair: Pair, old: Session | None) -> None:
        is_known = old is not None and (old.is_known or old.is_predecessor_known)
        session = self.sessions[pair] = Session(is_predecessor_known=is_known)
        if pair.receiver not in self.living:
            self.break_session(pair, session)

    def perform_receiver(
        self, name: str, effect: PostReceive | WriteChunk | DiscardChunk | SendAcknowledged | SendCancel | DropPeer
    ) -> None:
        pair = Pair(name_of(effect.peer), name)
        session = self.sessions.get(pair)
        if isinstance(effect, WriteChunk):
            self.writing.append((name, effect))
        elif isinstance(effect, DiscardChunk):
            del self.staged[(pair, effect.transfer_id, effect.seq)]
        elif session is None or not session.is_known or session.is_broken:
            return  # not into a session that the receiver has not heard of
        elif isinstance(effect, PostReceive):
            session.posted.append(effect)
        elif isinstance(effect, DropPeer):
            self.break_session(pair, session)
        else:
            session.down.append(message_down(effect))

    def _forget_if_over(self, pair: Pair, session: Session) -> None:
        if session.is_over and self.sessions.get(pair) is session:
            del self.sessions[pair]
