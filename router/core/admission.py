"""Who is let in: what a new request is refused for at once. Pure: no IO, no state."""

from common.values.errors import InvalidRequest, Overloaded, PdserveError
from common.values.messages import Role
from router.core.generation import GenerationRequest
from router.core.pool import WorkerPool

MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 30.0


def admission_error(
    spec: GenerationRequest, pool: WorkerPool, num_live: int, num_queued: int, max_num_queued: int
) -> PdserveError | None:
    """`num_queued` of the `num_live` requests have no decode worker yet."""
    if not spec.token_ids:
        return InvalidRequest("the prompt is empty", param="prompt")
    for role, worker_id in ((Role.PREFILL, spec.prefill_worker_id), (Role.DECODE, spec.decode_worker_id)):
        worker = pool.by_id(worker_id)
        if worker_id and (worker is None or worker.info.role is not role):
            param = f"routing.{role}_worker_id"
            return InvalidRequest(f"there is no {role} worker {worker_id!r}", param=param)
    return overload_error(num_live, num_queued) if num_queued >= max_num_queued else None


def overload_error(num_live: int, num_queued: int) -> Overloaded:
    """The hint is a guess: one second for each round of running requests until the queue has drained."""
    retry_after_s = min(MAX_RETRY_AFTER_S, max(MIN_RETRY_AFTER_S, num_queued / max(1, num_live - num_queued)))
    return Overloaded(f"{num_queued} requests wait already", retry_after_s=retry_after_s)
