"""Who holds which KV blocks on a worker, and whether its books add up: values, and their wire form. Pure: no IO."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from common.engine.kv.block_pool import BlockPool, PoolStats
from common.values.ids import WorkerRef
from common.values.messages import BlockHolder, Role, WorkerInfo
from common.wire.parts import attempt_id_from_pb, attempt_id_to_pb, prefill_try_from_pb
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


def audit_to_pb(found: Audit) -> pb.AuditResponse:
    return pb.AuditResponse(
        worker_id=found.ref.worker_id,
        incarnation=found.ref.incarnation,
        role=found.role,
        num_blocks=found.pool.total,
        used=found.pool.used,
        cached=found.pool.cached,
        free=found.pool.free,
        held=found.pool.held,
        holders=[_holder_to_pb(holder) for holder in found.holders],
        problems=found.problems,
    )


def audit_from_pb(response: pb.AuditResponse) -> Audit:
    """Raises ValueError when the role is none of ours."""
    return Audit(
        WorkerRef(response.worker_id, response.incarnation),
        Role(response.role),
        PoolStats(response.num_blocks, response.used, response.cached, response.free, response.held),
        tuple(_holder_from_pb(holder) for holder in response.holders),
        tuple(response.problems),
    )


def _holder_to_pb(holder: BlockHolder) -> pb.BlockHolder:
    return pb.BlockHolder(
        attempt=attempt_id_to_pb(holder.attempt_id),
        prefill_try=holder.prefill_try,
        phase=holder.phase,
        num_blocks=holder.num_blocks,
        age_s=holder.age_s,
        time_left_s=holder.time_left_s,
    )


def _holder_from_pb(message: pb.BlockHolder) -> BlockHolder:
    return BlockHolder(
        attempt_id_from_pb(message.attempt),
        message.phase,
        message.num_blocks,
        message.age_s,
        message.time_left_s,
        prefill_try_from_pb(message),
    )
