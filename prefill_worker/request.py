"""One prompt on a prefill worker: its facts and what follows from them. Pure: no IO.

    WAITING --scheduled--> RUNNING --last chunk--> COMPUTED --TransferEnded--> (gone)
       |                      |                       |
       | end                  +----------end----------+--> ENDING --> (gone)
       v                                                   when neither a step nor the transfer
    (gone)                                                 touches its blocks any more

`end` is a cancel, a failure, a deadline or a newer try. Blocks: none while WAITING; the whole prompt's as USED from
RUNNING on; as HELD once only the transfer needs them.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from common.engine.kv.block_pool import RefKind
from common.values.ids import BlockHash, RouterId, TransferId
from common.values.messages import Prefill
from common.values.request import ChunkTiming, Work


class Phase(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    COMPUTED = "computed"
    ENDING = "ending"


@dataclass(slots=True, eq=False)
class PrefillRequest:
    """Owned by the core; the scheduler moves `phase`, `block_table` and the token counts."""

    message: Prefill
    router_id: RouterId
    sequence_id: int
    arrived_s: float
    deadline_s: float  # absolute
    hashes: list[BlockHash]  # of the prompt's full blocks
    phase: Phase = Phase.WAITING
    block_table: tuple[int, ...] = ()
    ref_kind: RefKind = RefKind.USED  # of the references on block_table
    num_cached_tokens: int = 0  # while WAITING an estimate
    num_computed: int = 0  # tokens whose KV is in place
    num_scheduled: int = 0  # tokens in the running step; 0 = not part of it
    is_transferring: bool = False
    num_overtaken: int = 0  # admissions of later requests while this one found no blocks
    started_s: float | None = None  # None = not scheduled yet
    cancelled_choices: set[int] = field(default_factory=set)
    chunks: list[ChunkTiming] = field(default_factory=list)

    @property
    def work(self) -> Work:
        return self.message.work

    @property
    def transfer_id(self) -> TransferId:
        return TransferId(self.work.attempt_id, self.message.prefill_try)

    @property
    def num_tokens(self) -> int:
        return len(self.work.token_ids)

    @property
    def num_remaining(self) -> int:
        """Tokens to compute that are in no step yet; while WAITING, as far as known."""
        if self.phase is Phase.WAITING:
            return self.num_tokens - self.num_cached_tokens
        return self.num_tokens - self.num_computed - self.num_scheduled

    @property
    def is_busy(self) -> bool:
        """A step or a transfer may still touch its blocks."""
        return self.num_scheduled > 0 or self.is_transferring

    def __str__(self) -> str:
        return f"prefill {self.transfer_id} {self.phase} computed {self.num_computed}/{self.num_tokens}"
