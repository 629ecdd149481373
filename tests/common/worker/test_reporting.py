"""What a worker's messages to routers say of handoffs is in its metrics."""

import pytest

from common.engine.contract.plan import SampleSpec, ScheduledSequence, SequenceResult, StepPlan, StepResult
from common.telemetry.metrics import Metrics
from common.values.ids import AttemptId, RequestId
from common.values.messages import HandoffReport, TransferFailed, WorkerStats
from common.values.request import SampledToken, SamplingParams
from common.worker.reporting import record_drafts, record_message, report_stats

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


def test_the_speed_of_a_link_is_shown_and_one_below_its_floor_is_counted() -> None:
    metrics = Metrics("tiny", "decode", "decode-0")
    for rate in (2e9, 1e6, 0.0):  # the last: not measured yet
        report = HandoffReport(
            ATTEMPT, 4096, 2, 0.5, 0.1, 0.0, 0, is_local=False, transport="gloo", link_bytes_per_s=rate
        )
        record_message(metrics, report, min_link_bytes_per_s=50e6)
    (slow,) = lines_of(metrics, "pdserve_kv_slow_transfers_total")
    (speed,) = lines_of(metrics, "pdserve_link_bytes_per_second")
    assert 'transport="gloo"' in slow
    assert slow.endswith(" 1.0")
    assert speed.endswith(" 1e+06")


async def test_preemptions_are_counted_by_what_was_added() -> None:
    metrics = Metrics("tiny", "decode", "decode-0")
    counts = iter([0, 2, 2, 5])

    def stats_now() -> WorkerStats:
        return WorkerStats(num_preemptions=next(counts))  # until there are no more

    with pytest.raises(RuntimeError, match="StopIteration"):
        await report_stats(stats_now, lambda stats: None, metrics, interval_s=0.0)
    (count,) = lines_of(metrics, "pdserve_preemptions_total")
    assert count.endswith(" 5.0")


def test_drafts_are_counted_with_what_came_of_them() -> None:
    """Of four drafts two are right; of two the row fails; a sequence without any counts for nothing."""
    metrics, spec = Metrics("tiny", "decode", "decode-0"), SampleSpec(0, 3, SamplingParams(seed=1, max_tokens=9))
    tokens = tuple(SampledToken(token_id) for token_id in (5, 6, 7))
    sequences = (
        ScheduledSequence(1, (4,), 9, ((0,),), (spec,) * 5, (5, 6, 8, 9)),
        ScheduledSequence(2, (4,), 9, ((1,),), (spec,) * 3, (5, 6)),
        ScheduledSequence(3, (4,), 9, ((2,),), (spec,)),
    )
    results = SequenceResult(1, (tokens,)), SequenceResult(2, error="not finite"), SequenceResult(3, (tokens[:1],))
    record_drafts(metrics, StepPlan(1, sequences), StepResult(1, results, 0.1))
    record_drafts(metrics, StepPlan(2, sequences[2:]), StepResult(2, results[2:], 0.1))
    names = ("draft_tokens", "draft_tokens_accepted", "draft_tokens_wasted")
    counts = [lines_of(metrics, f"pdserve_{name}_total")[0].rpartition(" ")[2] for name in names]
    assert counts == ["6.0", "2.0", "4.0"]
    (total,), (num,) = (lines_of(metrics, f"pdserve_sequence_step_tokens_{part}") for part in ("sum", "count"))
    assert (total.rpartition(" ")[2], num.rpartition(" ")[2]) == ("3.0", "1.0")
