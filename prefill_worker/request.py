"""One prompt on a prefill worker: its facts and what follows from them. Pure: no IO.

    WAITING --scheduled--> RUNNING --last chunk--> COMPUTED --TransferEnded--> (gone)
       |                      |                       |
       | end                  +----------end----------+--> ENDING --TransferEnded--> (gone)
       v
    (gone)

`end` is a cancel, a failure, a deadline or a newer try. Blocks: none while WAITING; from RUNNING on the whole prompt's,
as USED by the scheduler until no step computes them, and as HELD by the request until the transfer has ended.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from common.engine.scheduling.sequence import BlockTableSet, Sequence
from common.values.ids import AttemptId, RouterId, TransferId
from common.values.messages import Prefill
from common.values.request import ChunkTiming, Work


class PrefillPhase(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    COMPUTED = "computed"
    ENDING = "ending"


@dataclass(slots=True, eq=False)
class PrefillRequest:
    """Owned by the core."""

    message: Prefill
    router_id: RouterId
    sequence: Sequence
    arrived_s: float
    deadline_s: float  # absolute
    live_choices: set[int]
    block_tables: BlockTableSet = ()  # HELD from the start of the transfer to its end
    is_ending: bool = False
    started_s: float | None = None  # None = not scheduled yet
    chunks: list[ChunkTiming] = field(default_factory=list)

    @property
    def work(self) -> Work:
        return self.message.work

    @property
    def attempt_id(self) -> AttemptId:
        return self.message.work.attempt_id

    @property
    def prefill_try(self) -> int:
        return self.message.prefill_try

    @property
    def transfer_id(self) -> TransferId:
        return TransferId(self.attempt_id, self.prefill_try)

    @property
    def is_transferring(self) -> bool:
        return bool(self.block_tables)

    @property
    def phase(self) -> PrefillPhase:
        if self.is_ending:
            return PrefillPhase.ENDING
        return PrefillPhase.COMPUTED if self.sequence.is_ended else PrefillPhase(self.sequence.phase)

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """What the scheduler has of it."""
        return () if self.sequence.is_ended else (self.sequence,)

    def __str__(self) -> str:
        return f"prefill {self.transfer_id} {self.phase}: {self.sequence}"
