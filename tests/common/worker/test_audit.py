"""Taking stock of a worker: what the cores say they hold, over the wire and back."""

from common.engine.kv.block_pool import BlockPool, PoolStats, RefKind
from common.values.ids import AttemptId, RequestId, WorkerRef
from common.values.messages import BlockHolder, Role, WorkerInfo
from common.values.ranks import Rank
from common.values.request import Fingerprint
from common.worker.audit import AUDIT, Audit, audit

ATTEMPT = AttemptId(RequestId("r"), 1)
INFO = WorkerInfo(WorkerRef("d0", "a"), Role.DECODE, "m", 16, 8, 128, 4, 1, Fingerprint(()), "h:1")


class Core:
    """Holds three blocks, says so, and finds its state in order unless told otherwise."""

    def __init__(self, problem: str = "") -> None:
        self._problem = problem
        pool = BlockPool(8, 16)
        pool.allocate(3, RefKind.HELD)
        self.blocks = pool  # has `stats`

    def check_invariants(self) -> None:
        assert not self._problem, self._problem

    def holders(self, now_s: float) -> list[BlockHolder]:
        return [BlockHolder(ATTEMPT, "reserved", 3, now_s - 1.0, 9.0 - now_s)]


def test_an_audit_says_who_holds_what_and_for_how_long() -> None:
    found = audit(INFO, Core(), 5.0)
    holder = BlockHolder(ATTEMPT, "reserved", 3, 4.0, 4.0)
    assert found == Audit(INFO.ref, Role.DECODE, PoolStats(8, 0, 0, 5, 3), (holder,), ())


def test_an_invariant_that_does_not_hold_is_reported_and_not_raised() -> None:
    (problem,) = audit(INFO, Core("block 3 is held without an owner"), 5.0).problems
    assert problem.startswith("block 3 is held without an owner")


def test_an_audit_survives_the_wire() -> None:
    holders = (BlockHolder(ATTEMPT, "ending", 2, 1.5, -3.25, prefill_try=0), BlockHolder(ATTEMPT, "ready", 1, 0.5, 2.0))
    found = Audit(INFO.ref, Role.PREFILL, PoolStats(8, 2, 1, 4, 1), holders, ("x", "y"), Rank(1, 2))
    assert AUDIT.decode(AUDIT.encode(found)) == found
