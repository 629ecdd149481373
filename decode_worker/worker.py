"""The decode worker: its core and its receiver sessions in the common shell."""

from collections.abc import Callable

from common.worker.lifecycle import Surroundings
from common.worker.role import RoleShell
from decode_worker.core import DecodeCore, DecodeLimits
from kvtransfer.events import ReceiverEvent
from kvtransfer.receiver.core import ReceiverCore
from kvtransfer.receiver.sessions import ReceiverSessions
from kvtransfer.settings import chunk_planner, session_settings


def build(around: Surroundings) -> RoleShell:
    """A decode worker around a loaded model."""
    config, loaded, pool = around.config, around.loaded, around.new_pool()
    receiver = ReceiverCore(chunk_planner(config, loaded), config.max_inflight_bytes, config.link_timeout_s)
    core = DecodeCore(pool, receiver, DecodeLimits.of(config), around.hash_fields)

    def open_sessions(post: Callable[[ReceiverEvent], None]) -> ReceiverSessions:
        sessions = ReceiverSessions(session_settings(config, loaded, around.ref), post)
        sessions.add_to(around.server)
        return sessions

    return RoleShell(around, pool, core, open_sessions)
