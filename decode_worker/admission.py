"""Which requests a decode worker takes: what is refused for good, what for now, and the blocks of the rest. Pure."""

from common.engine.kv.block_pool import RefKind
from common.engine.scheduling.scheduler import Scheduler
from common.engine.scheduling.sequence import BlockTableSet
from common.values.ids import RouterId
from common.values.messages import Refused, Reserve
from common.values.request import Work
from common.worker.core import CoreState
from decode_worker.request import DecodePhase, DecodeRequest


def refusal(work: Work, state: CoreState[DecodeRequest]) -> Refused | None:
    """Why `work` is not taken, apart from the blocks that are free just now; None = it may be."""
    problem = _permanent_problem(work, state.scheduler)
    if problem is not None:
        return Refused(work.attempt_id, problem, is_retryable=False)
    problem = _passing_problem(work, state)
    if problem is not None:
        return Refused(work.attempt_id, problem, is_retryable=True)
    return None


def reserve(
    router_id: RouterId, message: Reserve, state: CoreState[DecodeRequest], now_s: float
) -> tuple[DecodeRequest, BlockTableSet] | None:
    """The new request and the block tables of its prompt: USED if it is local, else HELD. None = no blocks."""
    work, scheduler = message.work, state.scheduler
    hashes = scheduler.blocks.hashes_of(work)
    # A prompt whose logprobs are told is computed from its beginning; what is cached here need not be sent, no more.
    is_scored = work.num_prompt_logprobs is not None
    num_here = 0 if is_scored else scheduler.blocks.match(hashes, len(work.token_ids) - 1)
    is_local = len(work.token_ids) - num_here * scheduler.blocks.block_size <= message.local_prefill_max_tokens
    num_hit = num_here if is_local else scheduler.blocks.match_received(hashes, len(work.token_ids))
    num_cached_tokens = num_hit * scheduler.blocks.block_size
    kind = RefKind.USED if is_local else RefKind.HELD
    block_tables = scheduler.blocks.reserve(hashes, num_hit, len(work.token_ids), kind, len(scheduler.running))
    if block_tables is None:
        return None
    request = DecodeRequest(
        work=work,
        router_id=router_id,
        order=state.requests.num_added,
        arrived_s=now_s,
        deadline_s=now_s + work.deadline_s,
        hashes=hashes,
        live_choices=set(work.choices),
        phase=DecodePhase.READY if is_local else DecodePhase.RESERVED,
        num_cached_tokens=num_cached_tokens,
        is_local=is_local,
    )
    return request, block_tables


def _permanent_problem(work: Work, scheduler: Scheduler) -> str | None:
    if not work.token_ids or not work.choices or work.num_output_tokens >= work.sampling.max_tokens:
        return "nothing to generate"
    # The KV of a choice's last token is never needed. One choice alone must fit; its siblings can wait.
    num_tokens = max(len(work.token_ids), work.num_prompt_tokens + work.sampling.max_tokens - 1)
    problem = scheduler.blocks.never_fits(num_tokens)
    if problem is None and work.num_sequences > scheduler.limits.max_num_queued:
        problem = f"{work.num_sequences} choices or beams, at most {scheduler.limits.max_num_queued}"
    return problem


def _passing_problem(work: Work, state: CoreState[DecodeRequest]) -> str | None:
    if state.draining.is_requested:
        return "draining"
    num_sequences = sum(_num_sequences(request) for request in state.requests.all)
    if num_sequences + work.num_sequences > state.scheduler.limits.max_num_queued:
        return "queue full"
    if work.attempt_id in state.requests.ending:
        return "the same attempt is still ending"
    if state.scheduler.is_short_of_blocks:
        return "no blocks"
    return None


def _num_sequences(request: DecodeRequest) -> int:
    return max(len(request.live_choices), request.work.sampling.num_beams)
