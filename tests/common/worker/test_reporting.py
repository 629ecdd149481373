"""What a worker's messages to routers say of handoffs is in its metrics."""

import pytest

from common.telemetry.metrics import Metrics
from common.values.ids import AttemptId, RequestId
from common.values.messages import HandoffReport, TransferFailed, WorkerStats
from common.worker.reporting import record_message, report_stats

ATTEMPT = AttemptId(RequestId("r"), 1)


def lines_of(metrics: Metrics, name: str) -> list[str]:
    return [line for line in metrics.exposition().decode().splitlines() if line.startswith(f"{name}{{")]


def test_a_transfer_that_ended_early_is_counted_by_how_it_ended() -> None:
    metrics = Metrics("tiny", "decode", "decode-0")
    record_message(metrics, TransferFailed(ATTEMPT, 1, "link_lost prefill-0 is gone"))
    record_message(metrics, TransferFailed(ATTEMPT, 2, "link_lost another text"))
    record_message(metrics, TransferFailed(ATTEMPT, 3, "cancelled"))
    counts = {
        line.partition('reason="')[2].partition('"')[0]: line.rpartition(" ")[2]
        for line in lines_of(metrics, "pdserve_kv_transfer_failures_total")
    }
    assert counts == {"link_lost": "2.0", "cancelled": "1.0"}


def test_a_shipped_handoff_is_measured_and_a_local_one_is_not() -> None:
    metrics = Metrics("tiny", "decode", "decode-0")
    for is_local in (False, True):
        report = HandoffReport(ATTEMPT, 4096, 2, 0.5, 0.1, 0.0, 0, is_local)
        record_message(metrics, report)
    (count,) = lines_of(metrics, "pdserve_kv_transfer_bytes_count")
    assert count.endswith(" 1.0")


async def test_preemptions_are_counted_by_what_was_added() -> None:
    metrics = Metrics("tiny", "decode", "decode-0")
    counts = iter([0, 2, 2, 5])

    def stats_now() -> WorkerStats:
        return WorkerStats(num_preemptions=next(counts))  # until there are no more

    with pytest.raises(RuntimeError, match="StopIteration"):
        await report_stats(stats_now, lambda stats: None, metrics, interval_s=0.0)
    (count,) = lines_of(metrics, "pdserve_preemptions_total")
    assert count.endswith(" 5.0")
