"""`pdserve audit`: do the KV blocks of every worker add up, who holds them, and is anything held for too long.

The router says which workers there are; each is asked itself. Changes nothing.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc

from common.tls.identity import Component, Identity
from common.values.errors import PeerError
from common.values.messages import BlockHolder
from common.wire.pb import worker_pb2, worker_pb2_grpc
from common.worker.audit import AUDIT, Audit
from deploy.client.admin import AdminClient
from deploy.client.show import table

TIMEOUT_S = 5.0
# What is held past its deadline waits for a step or a transfer to end; their own limits are shorter than this.
OVERDUE_S = 15.0
MAX_ASKED_AT_ONCE = 16
_POOL_HEADER = ("worker", "free", "cached", "held", "used", "blocks", "")
_HOLDING_HEADER = ("worker", "holder", "phase", "blocks", "for", "deadline in")


@dataclass(frozen=True, slots=True)
class Finding:
    """One worker's answer, or None with a problem that says why there is none."""

    worker_id: str
    audit: Audit | None
    problems: tuple[str, ...]


def run_audit(url: str, *, as_json: bool, identity: Identity | None = None) -> int:
    """Print the books of every worker; 1 when something is wrong, else 0. `identity`: who asks, as an operator."""
    workers = AdminClient(url).state()["workers"]
    asker = identity or Identity(Component.OPERATOR, "")
    with ThreadPoolExecutor(MAX_ASKED_AT_ONCE) as threads:
        findings = list(threads.map(lambda worker: ask(worker, asker), workers))
    print(json.dumps([as_dict(finding) for finding in findings]) if as_json else "\n".join(lines_of(findings)))
    return 1 if any(finding.problems for finding in findings) else 0


def ask(worker: Mapping[str, Any], identity: Identity) -> Finding:
    """One worker's books. A worker that does not answer is a problem, not an error."""
    worker_id = str(worker["worker_id"])
    try:
        with identity.blocking_channel(worker["address"], worker["role"]) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)  # type: ignore[no-untyped-call]
            found = AUDIT.decode(stub.Audit(worker_pb2.AuditRequest(), timeout=TIMEOUT_S))
    except grpc.RpcError as error:
        return Finding(worker_id, None, (f"does not answer: {_reason(error)}",))
    except PeerError as error:
        return Finding(worker_id, None, (f"answers nonsense: {error}",))
    return Finding(worker_id, found, tuple(problems_of(found)))


def _reason(error: grpc.RpcError) -> str:
    """A refusal says by itself whose certificate is not what it should be."""
    code: grpc.StatusCode = error.code()
    return f"{code.name}: {error.details()}" if code is grpc.StatusCode.PERMISSION_DENIED else code.name


def problems_of(found: Audit) -> Iterator[str]:
    """What is wrong with a worker's books."""
    pool = found.pool
    counted = pool.free + pool.cached + pool.held + pool.used
    if counted != pool.total:
        yield f"{pool.free} free + {pool.cached} cached + {pool.held} held + {pool.used} used != {pool.total}"
    if pool.used + pool.held > sum(holder.num_blocks for holder in found.holders):
        yield f"{pool.used + pool.held} blocks are used or held without a holder"
    yield from found.problems
    for holder in found.holders:
        if holder.time_left_s < -OVERDUE_S:
            yield f"{_name(holder)} holds {holder.num_blocks} blocks {-holder.time_left_s:.0f} s past its deadline"


def as_dict(finding: Finding) -> dict[str, Any]:
    """For `--json`."""
    found = finding.audit
    if found is None:
        return {"worker_id": finding.worker_id, "problems": list(finding.problems)}
    pool = found.pool
    return {
        "worker_id": finding.worker_id,
        "incarnation": found.ref.incarnation,
        "role": found.role.value,
        "blocks": {
            "total": pool.total,
            "free": pool.free,
            "cached": pool.cached,
            "held": pool.held,
            "used": pool.used,
        },
        "holders": [
            {
                "request_id": holder.attempt_id.request_id,
                "attempt": holder.attempt_id.attempt,
                "prefill_try": holder.prefill_try,
                "phase": holder.phase,
                "num_blocks": holder.num_blocks,
                "age_s": holder.age_s,
                "time_left_s": holder.time_left_s,
            }
            for holder in found.holders
        ],
        "problems": list(finding.problems),
    }


def lines_of(findings: Sequence[Finding]) -> Iterator[str]:
    """For people: a line per pool, then who holds what, then what is wrong."""
    yield from table([_POOL_HEADER, *(_pool_row(finding) for finding in findings)])
    audits = [(finding.worker_id, finding.audit) for finding in findings if finding.audit is not None]
    rows = [_holder_row(worker_id, holder) for worker_id, found in audits for holder in found.holders]
    if rows:
        yield ""
        yield from table([_HOLDING_HEADER, *rows])
    for finding in findings:
        yield from (f"{finding.worker_id}: {problem}" for problem in finding.problems)


def _pool_row(finding: Finding) -> tuple[str, ...]:
    verdict = "WRONG" if finding.problems else "adds up"
    if finding.audit is None:
        return (finding.worker_id, "", "", "", "", "", verdict)
    pool = finding.audit.pool
    counts = (pool.free, pool.cached, pool.held, pool.used, pool.total)
    return (finding.worker_id, *map(str, counts), verdict)


def _holder_row(worker_id: str, holder: BlockHolder) -> tuple[str, ...]:
    age, left = f"{holder.age_s:.1f} s", f"{holder.time_left_s:.1f} s"
    return (worker_id, _name(holder), holder.phase, str(holder.num_blocks), age, left)


def _name(holder: BlockHolder) -> str:
    attempt = f"{holder.attempt_id.request_id}/{holder.attempt_id.attempt}"
    return attempt if holder.prefill_try is None else f"{attempt} try {holder.prefill_try}"
