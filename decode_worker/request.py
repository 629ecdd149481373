"""One request on a decode worker, from Reserve to its last token. Pure: no IO.

    RESERVED --TransferReceived--> READY --every choice ended--> (gone)
       |                             |
       | end                         +--end--> (gone; sequences in the running step keep their blocks until it ends)
       v
    ENDING --AttemptReleased--> (gone)

`end` is a cancel, a failure or a deadline. A prompt that this worker prefills itself starts READY. Blocks: the
prompt's as HELD while RESERVED or ENDING; the sequences' as USED, by the scheduler, once READY.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from common.engine.scheduling.sequence import BlockTableSet, HashChain, Sequence
from common.values.ids import AttemptId, RouterId
from common.values.request import TokenEvent, Work
from decode_worker.beam_search import BeamSearch, Candidates
from kvtransfer.events import TransferReceived


class DecodePhase(StrEnum):
    RESERVED = "reserved"
    READY = "ready"
    ENDING = "ending"


@dataclass(slots=True, eq=False)
class DecodeRequest:
    """Owned by the core."""

    work: Work
    router_id: RouterId
    order: int
    arrived_s: float
    deadline_s: float  # absolute
    hashes: HashChain
    live_choices: set[int]
    phase: DecodePhase = DecodePhase.RESERVED
    block_tables: BlockTableSet = ()  # HELD
    num_cached_tokens: int = 0
    is_local: bool = False
    sequences: list[Sequence] = field(default_factory=list)
    has_first_tokens: bool = False  # the choices have their own sequences now
    first_events: tuple[TokenEvent, ...] = ()  # received, not yet sent
    beams: BeamSearch | None = None  # once it has begun
    candidates: dict[int, Candidates] = field(default_factory=dict)  # of its beams that wait for others, by sequence
    last_activity_s: float = 0.0  # of its transfer
    transfer: TransferReceived | None = None
    ready_s: float = 0.0
    started_s: float | None = None  # None = in no step yet

    @property
    def attempt_id(self) -> AttemptId:
        return self.work.attempt_id

    @property
    def prefill_try(self) -> None:
        """A decode worker speaks of the attempt as a whole."""
        return None

    def __str__(self) -> str:
        return f"decode {self.attempt_id} {self.phase} choices {sorted(self.live_choices)}"
