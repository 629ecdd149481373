"""The prefill worker: its core and its sender sessions in the common shell."""

from common.engine.scheduling.scheduler import Limits
from common.worker.core import WorkerCore
from common.worker.lifecycle import WorkerContext
from common.worker.role import RoleShell
from kvtransfer.sender.core import SenderCore
from kvtransfer.sender.sessions import SenderSessions
from kvtransfer.settings import chunk_planner, session_settings
from prefill_worker.core import PrefillCore


def build(context: WorkerContext) -> RoleShell:
    """A prefill worker around a loaded model."""
    config, loaded, groups = context.config, context.loaded, context.new_pools()
    sender = SenderCore(chunk_planner(config, loaded), config.max_inflight_bytes, config.link_timeout_s)
    num_layers = loaded.cache.spec.num_layers
    core = PrefillCore(groups, sender, Limits.of(config), context.hash_fields, num_layers)
    settings = session_settings(config, loaded, context.ref)
    return RoleShell(context, WorkerCore(core), lambda post: SenderSessions(settings, post))
