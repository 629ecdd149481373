"""The prefill worker: its core and its sender sessions in the common shell."""

from common.worker.lifecycle import Surroundings
from common.worker.role import RoleShell
from kvtransfer.sender.core import SenderCore
from kvtransfer.sender.sessions import SenderSessions
from kvtransfer.settings import chunk_planner, session_settings
from prefill_worker.core import PrefillCore, PrefillLimits


def build(around: Surroundings) -> RoleShell:
    """A prefill worker around a loaded model."""
    config, loaded, pool = around.config, around.loaded, around.new_pool()
    sender = SenderCore(chunk_planner(config, loaded), config.max_inflight_bytes, config.link_timeout_s)
    num_layers = loaded.cache.shape.num_layers
    core = PrefillCore(pool, sender, PrefillLimits.of(config), around.hash_fields, num_layers)
    settings = session_settings(config, loaded, around.ref)
    return RoleShell(around, pool, core, lambda post: SenderSessions(settings, post))
