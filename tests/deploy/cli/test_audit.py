"""`pdserve audit` against workers over gRPC and a router's state over HTTP."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import grpc
import pytest

from common.engine.kv.block_pool import PoolStats
from common.tls.identity import Component, Identity
from common.values.ids import AttemptId, RequestId, WorkerRef
from common.values.messages import BlockHolder, Role
from common.wire.pb import worker_pb2, worker_pb2_grpc
from common.worker.audit import AUDIT, Audit
from deploy.cli.audit import OVERDUE_S, Finding, ask, lines_of, problems_of, run_audit
from deploy.client.admin import AdminClient

HOLDING = BlockHolder(AttemptId(RequestId("r1"), 0), "computed", 3, 2.0, 8.0, prefill_try=1)
GOOD = Audit(WorkerRef("prefill-0", "a"), Role.PREFILL, PoolStats(16, 0, 4, 9, 3), (HOLDING,), ())


@contextmanager
def worker(found: Audit) -> Iterator[str]:
    """The address of a worker that answers with `found`."""

    class Servicer(worker_pb2_grpc.WorkerServiceServicer):
        def Audit(self, request: object, context: object) -> worker_pb2.AuditResponse:
            return AUDIT.encode(found)

    server = grpc.server(ThreadPoolExecutor(1))
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(Servicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def audited(monkeypatch: pytest.MonkeyPatch, *addresses: str, as_json: bool = False) -> int:
    workers = [{"worker_id": f"w{idx}", "role": "decode", "address": address} for idx, address in enumerate(addresses)]
    monkeypatch.setattr(AdminClient, "state", lambda self: {"workers": workers})
    return run_audit("http://127.0.0.1:1", as_json=as_json)


def test_books_that_add_up_are_shown_with_their_holders(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with worker(GOOD) as address:
        assert audited(monkeypatch, address) == 0
    assert capsys.readouterr().out.splitlines() == [
        "worker  free  cached  held  used  blocks",
        "w0         9       4     3     0      16  adds up",
        "",
        "worker  holder      phase     blocks  for    deadline in",
        "w0      r1/0 try 1  computed       3  2.0 s  8.0 s",
    ]


def test_json_has_everything(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with worker(GOOD) as address:
        assert audited(monkeypatch, address, as_json=True) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["blocks"] == {"total": 16, "free": 9, "cached": 4, "held": 3, "used": 0}
    assert found["holders"][0]["request_id"] == "r1"
    assert found["problems"] == []


def test_one_worker_that_is_wrong_or_away_makes_the_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with worker(GOOD) as good, worker(replace(GOOD, problems=("block 3 is in 2 states",))) as wrong:
        assert audited(monkeypatch, good, wrong, "127.0.0.1:1") == 1
    printed = capsys.readouterr().out
    assert "w1: block 3 is in 2 states" in printed
    assert "w2: does not answer: " in printed


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        (replace(GOOD, pool=PoolStats(16, 0, 4, 8, 3)), "8 free + 4 cached + 3 held + 0 used != 16"),
        (replace(GOOD, holders=()), "3 blocks are used or held without a holder"),
        (
            replace(GOOD, holders=(replace(HOLDING, time_left_s=-OVERDUE_S - 5),)),
            "r1/0 try 1 holds 3 blocks 20 s past its deadline",
        ),
    ],
)
def test_what_is_wrong_is_named(found: Audit, problem: str) -> None:
    assert list(problems_of(found)) == [problem]


def test_what_is_a_little_late_waits_for_a_step_or_a_transfer() -> None:
    late = replace(GOOD, holders=(replace(HOLDING, time_left_s=-OVERDUE_S / 2),))
    assert list(problems_of(late)) == []


def test_a_worker_that_answers_nonsense_is_a_problem() -> None:
    with worker(replace(GOOD, role="router")) as address:  # type: ignore[arg-type]
        finding = ask({"worker_id": "w", "address": address, "role": "decode"}, Identity(Component.OPERATOR, ""))
    assert finding == Finding("w", None, ("answers nonsense: malformed AuditResponse: 'router' is not a valid Role",))
    assert "WRONG" in "\n".join(lines_of([finding]))
