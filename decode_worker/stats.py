"""What a decode worker tells routers about itself. Pure: reads only."""

from common.engine.kv.block_pool import PoolStats
from common.values.messages import WorkerState, WorkerStats
from decode_worker.scheduler import DecodeScheduler


def worker_stats(
    pool: PoolStats, scheduler: DecodeScheduler, num_held_attempts: int, *, is_draining: bool
) -> WorkerStats:
    """`num_waiting_uncached_tokens`: what local prefills and preempted sequences still have to compute."""
    placed = (*scheduler.waiting, *scheduler.running)
    return WorkerStats(
        state=WorkerState.DRAINING if is_draining else WorkerState.READY,
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting),
        num_waiting_uncached_tokens=sum(s.num_remaining for s in placed if not s.is_decoding),
        kv_blocks_used=pool.used,
        kv_blocks_cached=pool.cached,
        kv_blocks_free=pool.free,
        kv_blocks_held=pool.held,
        prefill_tokens_per_s=scheduler.prefill_tokens_per_s,
        step_s=scheduler.chunk_budget.step_s,
        num_preemptions=scheduler.num_preemptions,
        num_held_attempts=num_held_attempts,
    )
