"""One reservation on a decode worker, from Reserve to its last token. Pure: no IO.

    RESERVED --TransferReceived--> READY --every choice ended--> (gone)
       |                             |
       | end                         +--end--> (gone; sequences in the running step keep their blocks until it ends)
       v
    ENDING --AttemptReleased--> (gone)

`end` is a cancel, a failure or a deadline. An attempt that this worker prefills itself starts READY. Blocks: the
prompt's as HELD while RESERVED or ENDING; the sequences' as USED, by the scheduler, once READY.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from common.values.ids import AttemptId, BlockHash, RouterId
from common.values.request import TokenEvent, Work
from decode_worker.sequence import Sequence
from kvtransfer.events import TransferReceived


class AttemptPhase(StrEnum):
    RESERVED = "reserved"
    READY = "ready"
    ENDING = "ending"


@dataclass(slots=True, eq=False)
class Attempt:
    """Owned by the core."""

    work: Work
    router_id: RouterId
    order: int
    arrived_s: float
    deadline_s: float  # absolute
    hash_root: BlockHash
    hashes: list[BlockHash]  # of the full blocks of work.token_ids
    phase: AttemptPhase = AttemptPhase.RESERVED
    block_table: tuple[int, ...] = ()  # HELD
    num_cached_tokens: int = 0
    is_local: bool = False
    live_choices: set[int] = field(default_factory=set)
    sequences: list[Sequence] = field(default_factory=list)
    has_first_tokens: bool = False  # the choices have their own sequences now
    first_events: tuple[TokenEvent, ...] = ()  # received, not yet told
    last_activity_s: float = 0.0  # of its transfer
    transfer: TransferReceived | None = None
    ready_s: float = 0.0
    started_s: float | None = None  # None = in no step yet

    @property
    def attempt_id(self) -> AttemptId:
        return self.work.attempt_id

    def __str__(self) -> str:
        return f"attempt {self.attempt_id} {self.phase} choices {sorted(self.live_choices)}"
