"""What the handoff takes from a worker's configuration and its model."""

from common.engine.loading import LoadedModel
from common.tls.identity import Identity
from common.values.config import WorkerConfig
from common.values.ids import WorkerRef
from kvtransfer.chunk.plan import ChunkPlanner
from kvtransfer.session import SessionSettings


def chunk_planner(config: WorkerConfig, loaded: LoadedModel) -> ChunkPlanner:
    """How this model's KV is cut; both sides of a pair must come to the same sizes."""
    return ChunkPlanner(loaded.handoff_cache.spec, config.min_chunk_bytes)


def session_settings(config: WorkerConfig, loaded: LoadedModel, ref: WorkerRef) -> SessionSettings:
    """What the sessions of this life of a worker need to know."""
    return SessionSettings(
        ref=ref,
        fingerprint=loaded.fingerprint,
        cache=loaded.handoff_cache,  # of all ranks: a pair of workers has one link, whatever their widths
        host=config.host,
        transport=config.transport,
        digest=config.digest,
        max_inflight_bytes=config.max_inflight_bytes,
        link_timeout_s=config.link_timeout_s,
        identity=Identity(config.role, config.namespace, config.tls),
    )
