"""What a worker tells about itself all the time: to routers over their streams, to Prometheus as gauges."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from common.engine.contract.plan import StepPlan, StepResult
from common.telemetry.metrics import Metrics
from common.values.config import WorkerConfig
from common.values.messages import HandoffReport, TransferFailed, WorkerState, WorkerStats

STATS_INTERVAL_S = 0.25


async def report_stats(
    stats_now: Callable[[], WorkerStats],
    broadcast: Callable[[WorkerStats], None],
    metrics: Metrics,
    interval_s: float = STATS_INTERVAL_S,
) -> None:
    """Until cancelled, often enough that silence means trouble."""
    num_preemptions = 0
    while True:
        stats = stats_now()
        broadcast(stats)
        record_stats(metrics, stats)
        metrics.inc("pdserve_preemptions", stats.num_preemptions - num_preemptions)
        num_preemptions = stats.num_preemptions
        await asyncio.sleep(interval_s)


def record_stats(metrics: Metrics, stats: WorkerStats) -> None:
    """The gauges of one worker."""
    blocks = {
        "used": stats.kv_blocks_used,
        "cached": stats.kv_blocks_cached,
        "free": stats.kv_blocks_free,
        "held": stats.kv_blocks_held,
    }
    total = sum(blocks.values())
    for state, count in blocks.items():
        metrics.set("pdserve_kv_blocks", count, state=state)
    metrics.set("pdserve_kv_blocks_total", total)
    metrics.set("pdserve_kv_cache_usage_ratio", (blocks["used"] + blocks["held"]) / max(1, total))
    metrics.set("pdserve_requests_running", stats.num_running)
    metrics.set("pdserve_requests_waiting", stats.num_waiting)
    metrics.set("pdserve_waiting_uncached_tokens", stats.num_waiting_uncached_tokens)


def record_message(metrics: Metrics, message: object, min_link_bytes_per_s: float = 0.0) -> None:
    """What a message to a router says of handoffs, and whether their link is slower than it should be."""
    match message:
        case HandoffReport(is_local=False):
            metrics.observe("pdserve_kv_transfer_seconds", message.transfer_s)
            metrics.observe("pdserve_kv_transfer_exposed_seconds", message.exposed_s)
            metrics.observe("pdserve_kv_transfer_bytes", message.num_bytes)
            if message.link_bytes_per_s:
                metrics.set("pdserve_link_bytes_per_second", message.link_bytes_per_s, transport=message.transport)
                if message.link_bytes_per_s < min_link_bytes_per_s:
                    metrics.inc("pdserve_kv_slow_transfers", transport=message.transport)
        case TransferFailed(reason=reason):
            metrics.inc("pdserve_kv_transfer_failures", reason=reason.partition(" ")[0])  # its outcome


def record_drafts(metrics: Metrics, plan: StepPlan, result: StepResult) -> None:
    """What came of a step's drafts."""
    num_drafts = {sequence.sequence_id: len(sequence.draft_token_ids) for sequence in plan.sequences}
    if not any(num_drafts.values()):
        return
    sizes = [len(row.runs[0]) for row in result.results if num_drafts[row.sequence_id] and row.runs]
    num_accepted = sum(sizes) - len(sizes)
    metrics.inc("pdserve_draft_tokens", sum(num_drafts.values()))
    metrics.inc("pdserve_draft_tokens_accepted", num_accepted)
    metrics.inc("pdserve_draft_tokens_wasted", sum(num_drafts.values()) - num_accepted)
    for size in sizes:
        metrics.observe("pdserve_sequence_step_tokens", size)


def with_health(stats: WorkerStats, step_age_s: float, config: WorkerConfig) -> WorkerStats:
    """A step older than `max_step_s` makes the worker unhealthy, whatever its threads still answer."""
    return replace(stats, state=WorkerState.UNHEALTHY) if step_age_s > config.max_step_s else stats
