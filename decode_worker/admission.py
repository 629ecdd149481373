"""Who gets in: what is refused for good, what for now, and the blocks of those that are granted. Pure: no IO."""

from collections.abc import Collection, Mapping

from common.engine.kv.block_pool import BlockPool, RefKind
from common.values.hashing import block_hashes, hash_root
from common.values.ids import RouterId
from common.values.messages import Refused, Reserve
from common.values.request import Work
from decode_worker.attempt import Attempt
from decode_worker.scheduler import DecodeLimits, DecodeScheduler


class Admission:
    """Reads the pool's and the scheduler's state; takes blocks only in `reserve`."""

    def __init__(
        self, pool: BlockPool, scheduler: DecodeScheduler, limits: DecodeLimits, hash_fields: Mapping[str, str]
    ) -> None:
        self._pool = pool
        self._scheduler = scheduler
        self._max_num_choices = limits.max_num_seqs + limits.max_num_waiting
        self._hash_fields = dict(hash_fields)

    def refusal(self, work: Work, attempts: Collection[Attempt], *, is_draining: bool) -> Refused | None:
        """Why `work` is not taken, apart from the blocks that are free just now; None = it may be."""
        problem = self._permanent_problem(work)
        if problem is not None:
            return Refused(work.attempt_id, problem, is_retryable=False)
        problem = self._passing_problem(work, attempts, is_draining=is_draining)
        if problem is not None:
            return Refused(work.attempt_id, problem, is_retryable=True)
        return None

    def reserve(
        self, router_id: RouterId, message: Reserve, order: int, now_s: float
    ) -> tuple[Attempt, tuple[int, ...]] | None:
        """The new attempt and the block table of its prompt: USED if it is local, else HELD. None = no blocks."""
        work = message.work
        root = hash_root(self._hash_fields, self._pool.block_size, work.cache_salt)
        hashes = block_hashes(work.token_ids, self._pool.block_size, root)
        hit = self._scheduler.match(hashes, len(work.token_ids))
        num_cached_tokens = len(hit) * self._pool.block_size
        is_local = len(work.token_ids) - num_cached_tokens <= message.local_prefill_max_tokens
        kind = RefKind.USED if is_local else RefKind.HELD
        block_table = self._scheduler.reserve(hit, len(work.token_ids), kind)
        if block_table is None:
            return None
        attempt = Attempt(
            work=work,
            router_id=router_id,
            order=order,
            arrived_s=now_s,
            deadline_s=now_s + work.deadline_s,
            hash_root=root,
            hashes=hashes,
            num_cached_tokens=num_cached_tokens,
            is_local=is_local,
            live_choices=set(work.choices),
        )
        return attempt, block_table

    def _permanent_problem(self, work: Work) -> str | None:
        if not work.token_ids or not work.choices or work.num_output_tokens >= work.sampling.max_tokens:
            return "nothing to generate"
        # The KV of a choice's last token is never needed. One choice alone must fit; its siblings can wait.
        num_tokens = max(len(work.token_ids), work.num_prompt_tokens + work.sampling.max_tokens - 1)
        if self._pool.num_blocks_for(num_tokens) > self._pool.num_blocks:
            return f"{num_tokens} tokens never fit in {self._pool.num_blocks * self._pool.block_size}"
        if len(work.choices) > self._max_num_choices:
            return f"{len(work.choices)} choices, at most {self._max_num_choices}"
        return None

    def _passing_problem(self, work: Work, attempts: Collection[Attempt], *, is_draining: bool) -> str | None:
        if is_draining:
            return "draining"
        num_choices = sum(len(attempt.live_choices) for attempt in attempts)
        if num_choices + len(work.choices) > self._max_num_choices:
            return "queue full"
        if any(attempt.attempt_id == work.attempt_id for attempt in attempts):
            return "the same attempt is still ending"
        if self._scheduler.is_short_of_blocks:
            return "no blocks"
        return None
