"""The requests of a worker of either role: live ones with their deadlines, ended ones until nothing touches their
blocks. Pure: no IO."""

from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

from common.cores.deadlines import Deadlines
from common.engine.scheduling.sequence import BlockTableSet
from common.engine.scheduling.sequence import Sequence as ScheduledSequence
from common.values.ids import AttemptId, RouterId
from common.values.request import Work


class WorkerRequest(Protocol):
    """What both roles know of a request."""

    router_id: RouterId
    arrived_s: float
    deadline_s: float  # absolute
    live_choices: set[int]
    block_tables: BlockTableSet  # HELD: a transfer may touch these blocks

    @property
    def work(self) -> Work: ...

    @property
    def attempt_id(self) -> AttemptId: ...

    @property
    def prefill_try(self) -> int | None:
        """None on a decode worker, which speaks of the attempt as a whole."""
        ...

    @property
    def phase(self) -> Any: ...

    @property
    def sequences(self) -> Sequence[ScheduledSequence]:
        """What the scheduler has of it."""
        ...


RequestT = TypeVar("RequestT", bound=WorkerRequest)


class Requests(Generic[RequestT]):
    """Iterates over the live ones. `ending`: ended ones whose HELD blocks a transfer may still touch."""

    def __init__(self) -> None:
        self.ending: dict[Hashable, RequestT] = {}
        self.num_added = 0
        self._live: dict[AttemptId, RequestT] = {}
        self._deadlines: Deadlines[AttemptId] = Deadlines()

    def __iter__(self) -> Iterator[RequestT]:
        return iter(tuple(self._live.values()))

    @property
    def all(self) -> tuple[RequestT, ...]:
        return (*self._live.values(), *self.ending.values())

    def get(self, attempt_id: AttemptId) -> RequestT | None:
        """The live one of an attempt."""
        return self._live.get(attempt_id)

    def add(self, request: RequestT) -> None:
        self.num_added += 1
        self._live[request.attempt_id] = request
        self.set_deadline(request, request.deadline_s)

    def set_deadline(self, request: RequestT, deadline_s: float) -> None:
        """When to look at it again, if nothing happens before."""
        self._deadlines.set(request.attempt_id, deadline_s)

    def remove(self, request: RequestT) -> None:
        """It is no longer live."""
        del self._live[request.attempt_id]
        self._deadlines.discard(request.attempt_id)

    def next_deadline_s(self) -> float | None:
        return self._deadlines.next_s()

    def pop_expired(self, now_s: float) -> list[RequestT]:
        """Live requests whose deadline is reached; the caller ends them or sets another."""
        return [self._live[attempt_id] for attempt_id in self._deadlines.pop_expired(now_s)]

    def check_invariants(self) -> None:
        assert list(self._live) == [request.attempt_id for request in self._live.values()]
        assert set(self._deadlines) == set(self._live), "a live request without a deadline, or the reverse"
        assert all(request.block_tables for request in self.ending.values())
        assert not any(request.sequences for request in self.ending.values())
