"""The decode worker: its core and its receiver sessions in the common shell."""

from collections.abc import Callable

from common.engine.scheduling.scheduler import Limits
from common.worker.core import WorkerCore
from common.worker.lifecycle import WorkerContext
from common.worker.role import RoleShell
from decode_worker.core import DecodeCore
from kvtransfer.events import ReceiverEvent
from kvtransfer.receiver.core import ReceiverCore
from kvtransfer.receiver.sessions import ReceiverSessions
from kvtransfer.settings import chunk_planner, session_settings


def build(context: WorkerContext) -> RoleShell:
    """A decode worker around a loaded model."""
    config, loaded, groups = context.config, context.loaded, context.new_pools()
    receiver = ReceiverCore(chunk_planner(config, loaded), config.max_inflight_bytes, config.link_timeout_s)
    core = DecodeCore(groups, receiver, Limits.of(config), context.hash_fields)

    def open_sessions(post: Callable[[ReceiverEvent], None]) -> ReceiverSessions:
        sessions = ReceiverSessions(session_settings(config, loaded, context.ref), post)
        sessions.add_to(context.server)
        return sessions

    return RoleShell(context, WorkerCore(core), open_sessions)
