"""Which tokens of which prompts the next step computes. Owns the queue and the references on blocks. Pure: no IO.

Policy, per step, within the token budget:
* Strictly by priority. Within one priority, prompts that one step can finish go first (in arrival order), then the
  long ones (in arrival order): a long prompt delays a short one by the chunk that is running when it arrives.
* After `MAX_SHORT_STEPS` steps in which long prompts got next to nothing, the first of them goes first once.
* A prompt gets all of its blocks when it is first scheduled, so two half-allocated prompts never wait for each other.
* One that finds no blocks may be overtaken by smaller ones, `MAX_OVERTAKEN` times; then they wait for it.
"""

from dataclasses import dataclass
from typing import Self

from common.engine.contract.plan import ScheduledSequence, StepPlan, sample_spec
from common.engine.kv.block_pool import BlockPool, RefKind
from common.values.config import WorkerConfig
from prefill_worker.request import Phase, PrefillRequest

MAX_SHORT_STEPS = 4
MAX_OVERTAKEN = 16
# Waiting prompts that may fail to get blocks per step, before the search ends: bounds a step's planning time.
MAX_BLOCKED = 8


@dataclass(frozen=True, slots=True)
class PrefillLimits:
    """Bounds of one step (tokens, sequences) and of the queue."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_num_waiting: int

    @classmethod
    def of(cls, config: WorkerConfig) -> Self:
        return cls(config.max_num_batched_tokens, config.max_num_seqs, config.max_num_waiting)


class PrefillScheduler:
    """Plans one step at a time: `schedule`, then `finish_step` or `fail_step`."""

    def __init__(self, pool: BlockPool, limits: PrefillLimits) -> None:
        self._pool = pool
        self._limits = limits
        self._queue: dict[int, PrefillRequest] = {}  # WAITING and RUNNING, in arrival order
        self._in_step: list[PrefillRequest] = []
        self._num_steps = 0
        self._num_short_steps = 0  # in a row, while a long prompt was there

    @property
    def is_full(self) -> bool:
        return len(self._queue) >= self._limits.max_num_seqs + self._limits.max_num_waiting

    @property
    def queued(self) -> tuple[PrefillRequest, ...]:
        """The requests that are WAITING or RUNNING."""
        return tuple(self._queue.values())

    @property
    def in_step(self) -> tuple[PrefillRequest, ...]:
        """The requests of the running step; ENDING ones included."""
        return tuple(self._in_step)

    @property
    def step_id(self) -> int | None:
        """The running step, or None between steps."""
        return self._num_steps if self._in_step else None

    def can_ever_fit(self, num_tokens: int) -> bool:
        return self._pool.num_blocks_for(num_tokens) <= self._pool.num_blocks

    def add(self, request: PrefillRequest) -> None:
        """Queue a WAITING request. The caller has asked `is_full` and `can_ever_fit`."""
        assert request.phase is Phase.WAITING
        request.num_cached_tokens = len(self._match(request)) * self._pool.block_size
        self._queue[request.sequence_id] = request

    def remove(self, request: PrefillRequest) -> None:
        """Plan no more of a request; it keeps its blocks."""
        self._queue.pop(request.sequence_id, None)

    def schedule(self) -> StepPlan | None:
        """Fill the next step; None when there is nothing to compute or no room to."""
        assert not self._in_step
        budget = self._limits.max_num_batched_tokens
        blocked: list[PrefillRequest] = []
        for request in self._in_order():
            if budget == 0 or len(self._in_step) == self._limits.max_num_seqs:
                break
            if request.phase is Phase.WAITING and not self._admit(request, blocked):
                continue
            budget -= self._take(request, budget)
        if not self._in_step:
            return None
        self._num_steps += 1
        return StepPlan(self._num_steps, tuple(_scheduled_sequence(request) for request in self._in_step))

    def finish_step(self, untrusted: set[int]) -> list[tuple[PrefillRequest, int]]:
        """The step's tokens are computed: (request, number of tokens) of each. Full blocks become findable at once.

        Not so those of the `untrusted` sequence ids: nothing of what they computed is used again.
        """
        finished = self._end_step()
        for request, num_tokens in finished:
            request.num_computed += num_tokens
            if request.sequence_id in untrusted:
                self._pool.unregister(request.block_table)
            else:
                self._register(request, request.num_computed - num_tokens)
        return finished

    def fail_step(self) -> list[PrefillRequest]:
        """Nothing of the step counts; its requests."""
        return [request for request, _ in self._end_step()]

    def hold_blocks(self, request: PrefillRequest) -> None:
        """No step needs the blocks any more, a transfer may."""
        if request.ref_kind is RefKind.USED:
            self._pool.convert(request.block_table, RefKind.USED, RefKind.HELD)
            request.ref_kind = RefKind.HELD

    def release_blocks(self, request: PrefillRequest) -> None:
        """Nothing touches the blocks any more; their content stays cached."""
        assert not request.is_busy, f"release of busy {request}"
        self._pool.release(request.block_table, request.ref_kind)
        request.block_table = ()

    def _in_order(self) -> list[PrefillRequest]:
        """The queue, most urgent first."""
        long = [request for request in self._queue.values() if self._is_long(request)]
        first_long = min(long, key=lambda request: (request.work.priority, request.sequence_id), default=None)
        self._num_short_steps = self._num_short_steps + 1 if first_long else 0
        favoured = first_long if self._num_short_steps > MAX_SHORT_STEPS else None

        def urgency(request: PrefillRequest) -> tuple[int, bool, bool, int]:
            is_favoured = request is favoured
            is_long = not is_favoured and self._is_long(request)
            return request.work.priority, not is_favoured, is_long, request.sequence_id

        return sorted(self._queue.values(), key=urgency)

    def _take(self, request: PrefillRequest, budget: int) -> int:
        """Put as many tokens of a RUNNING request into the step as the budget allows."""
        is_long = self._is_long(request)
        request.num_scheduled = min(budget, request.num_remaining)
        if is_long and request.num_scheduled >= self._limits.max_num_batched_tokens // 8:
            self._num_short_steps = 0
        self._in_step.append(request)
        return request.num_scheduled

    def _is_long(self, request: PrefillRequest) -> bool:
        return request.num_remaining > self._limits.max_num_batched_tokens

    def _admit(self, request: PrefillRequest, blocked: list[PrefillRequest]) -> bool:
        """WAITING -> RUNNING with blocks for the whole prompt; False, and on the list, when there are too few."""
        if len(blocked) >= MAX_BLOCKED or any(other.num_overtaken >= MAX_OVERTAKEN for other in blocked):
            return False
        hit = self._match(request)
        self._pool.acquire(hit, RefKind.USED)
        fresh = self._pool.allocate(self._pool.num_blocks_for(request.num_tokens) - len(hit), RefKind.USED)
        if fresh is None:
            self._pool.release(hit, RefKind.USED)
            blocked.append(request)
            return False
        for other in blocked:
            other.num_overtaken += 1
        request.phase = Phase.RUNNING
        request.block_table = (*hit, *fresh)
        request.num_cached_tokens = request.num_computed = len(hit) * self._pool.block_size
        return True

    def _match(self, request: PrefillRequest) -> list[int]:
        """Cached blocks of the prompt; never the block of its last token, whose logits must be computed."""
        return self._pool.match_prefix(request.hashes[: (request.num_tokens - 1) // self._pool.block_size])

    def _register(self, request: PrefillRequest, start: int) -> None:
        size = self._pool.block_size
        for idx in range(start // size, request.num_computed // size):
            self._pool.register(request.block_table[idx], request.hashes[idx])

    def _end_step(self) -> list[tuple[PrefillRequest, int]]:
        ended = [(request, request.num_scheduled) for request in self._in_step]
        for request in self._in_step:
            request.num_scheduled = 0
        self._in_step = []
        return ended


def _scheduled_sequence(request: PrefillRequest) -> ScheduledSequence:
    work, start = request.work, request.num_computed
    end = start + request.num_scheduled
    is_last = end == request.num_tokens
    return ScheduledSequence(
        sequence_id=request.sequence_id,
        token_ids=work.token_ids[start:end],
        start=start,
        block_tables=(request.block_table,),
        samples=tuple(sample_spec(work, choice, work.token_ids) for choice in work.choices) if is_last else (),
    )
