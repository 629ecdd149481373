"""Who holds which KV blocks on a worker, and whether its invariants hold: values, and their wire form. Pure: no IO."""

from dataclasses import dataclass
from typing import Any

from common.engine.kv.block_pool import PoolStats
from common.values.ids import WorkerRef
from common.values.messages import BlockHolder, Role, WorkerInfo
from common.values.ranks import WHOLE, Rank
from common.wire.codec import derive
from common.wire.pb import worker_pb2 as pb
from common.worker.core import WorkerCore


@dataclass(frozen=True, slots=True)
class Audit:
    """What one worker holds. `problems` are invariants that do not hold."""

    ref: WorkerRef
    role: Role
    pool: PoolStats
    holders: tuple[BlockHolder, ...]
    problems: tuple[str, ...]
    rank: Rank = WHOLE  # whose cache was counted


def audit(info: WorkerInfo, core: WorkerCore[Any], now_s: float, rank: Rank = WHOLE) -> Audit:
    """Take stock between two events. O(num_blocks)."""
    try:
        core.check_invariants()
        problems: tuple[str, ...] = ()
    except AssertionError as error:
        problems = (str(error) or "an invariant does not hold",)
    return Audit(info.ref, info.role, core.blocks.stats(), tuple(core.holders(now_s)), problems, rank)


AUDIT = derive(Audit, pb.AuditResponse)
