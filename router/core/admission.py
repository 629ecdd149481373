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
    if num_queued < max_num_queued:
        return None
    return Overloaded(f"{num_queued} requests wait already", retry_after_s=_retry_after_s(num_queued, num_live))


def _retry_after_s(num_queued: int, num_live: int) -> float:
    """A guess: one second for each round of running requests until the queue has drained."""
    return min(MAX_RETRY_AFTER_S, max(MIN_RETRY_AFTER_S, num_queued / max(1, num_live - num_queued)))
