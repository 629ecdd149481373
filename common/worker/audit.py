"""Who holds which KV blocks on a worker, and whether its books add up: values, and their wire form. Pure: no IO."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from common.engine.kv.block_pool import BlockPool, PoolStats
from common.values.ids import WorkerRef
from common.values.messages import BlockHolder, Role, WorkerInfo
from common.wire.codec import derive
from common.wire.pb import worker_pb2 as pb


@dataclass(frozen=True, slots=True)
class Audit:
    """One worker's books. `problems` are invariants that do not hold."""

    ref: WorkerRef
    role: Role
    pool: PoolStats
    holders: tuple[BlockHolder, ...]
    problems: tuple[str, ...]


class Audited(Protocol):
    """A role's core, as far as an audit goes."""

    def check_invariants(self) -> None: ...

    def holders(self, now_s: float) -> Sequence[BlockHolder]: ...


def audit(info: WorkerInfo, pool: BlockPool, core: Audited, now_s: float) -> Audit:
    """Take stock between two events. O(num_blocks)."""
    try:
        core.check_invariants()
        problems: tuple[str, ...] = ()
    except AssertionError as error:
        problems = (str(error) or "an invariant does not hold",)
    return Audit(info.ref, info.role, pool.stats(), tuple(core.holders(now_s)), problems)


AUDIT = derive(Audit, pb.AuditResponse)
