"""The prefill worker's shell of the handoff: control streams and links to decode workers. No decisions here."""

import asyncio
from typing import assert_never

from common.telemetry.logs import get_logger
from common.values.ids import WorkerRef
from kvtransfer.chunk.pack import kv_packer
from kvtransfer.events import ConnectPeer, DropPeer, PeerLost, SendCancel, SendChunk, SendFinished
from kvtransfer.sender.session import Post, SenderSession
from kvtransfer.session import STOPPING, SessionSettings

NetworkEffect = ConnectPeer | SendChunk | SendFinished | SendCancel | DropPeer


class SenderSessions:
    """Performs the sender core's network effects. Create and call it in the event loop's thread."""

    def __init__(self, settings: SessionSettings, post: Post) -> None:
        self._settings = settings
        self._post = post
        self._kv_packer = kv_packer(settings.cache)
        self._peers: dict[WorkerRef, SenderSession] = {}
        self._is_closed = False

    def perform(self, effect: NetworkEffect) -> None:
        """Effects for a peer that was just lost do nothing: its PeerLost is on the way."""
        if isinstance(effect, ConnectPeer):
            self._connect(effect)
            return
        session = self._peers.get(effect.peer)
        if session is None:
            return
        match effect:
            case SendChunk() | SendFinished() | SendCancel():
                session.send(effect)
            case DropPeer():
                session.end(effect.reason)
            case _:
                assert_never(effect)

    async def close(self) -> None:
        """End every session; returns when no block is read and no thread of ours can be waited for any more.

        A peer that is to be connected later is lost at once.
        """
        self._is_closed = True
        sessions = list(self._peers.values())
        for session in sessions:
            session.end(STOPPING)
        await asyncio.gather(*(session.ended() for session in sessions))

    @property
    def is_quiet(self) -> bool:
        """After `close`: no block is read any more."""
        return not self._peers

    def _connect(self, effect: ConnectPeer) -> None:
        if self._is_closed:
            self._post(PeerLost(effect.peer, STOPPING))
            return
        assert effect.peer not in self._peers
        self._peers[effect.peer] = SenderSession(self._settings, self._kv_packer, effect, self._post, self._on_ended)

    def _on_ended(self, peer: WorkerRef, reason: str) -> None:
        get_logger().info("handoff_peer_lost", peer=str(peer), reason=reason)
        del self._peers[peer]
        self._post(PeerLost(peer, reason))
