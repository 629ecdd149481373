"""Which workers the router holds a stream to, by what Redis lists and what the streams say. Pure: no IO.

A worker's open stream outranks the absence of its lease: Redis may have lost the key alone. A stream that broke is
opened again for a while whatever Redis says, and not when the worker itself ended it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from common.values.ids import WorkerRef

# A worker with neither lease nor stream is tried for so long.
UNLISTED_S = 30.0


class StreamState(Enum):
    """open: the worker has said who it is, and the stream goes on. ended: by the worker itself, in order."""

    OPEN = "open"
    BROKEN = "broken"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class RosterChange:
    """`connect`: hold a stream from now on. `retire`: do not open one again. `known`: everybody, those included."""

    connect: tuple[WorkerRef, ...]
    retire: tuple[WorkerRef, ...]
    known: frozenset[WorkerRef]


class Roster:
    """Owns who has been superseded, and since when a worker has been without lease and stream."""

    def __init__(self) -> None:
        self._missing_since_s: dict[WorkerRef, float] = {}
        self._superseded: set[WorkerRef] = set()  # listed still, but a later life has come

    def supersede(self, ref: WorkerRef) -> None:
        """A later life of the worker is there: this one is not connected to again."""
        self._superseded.add(ref)

    def follow(
        self, listed: frozenset[WorkerRef], streams: Mapping[WorkerRef, StreamState], now_s: float
    ) -> RosterChange:
        """Redis has answered. `streams`: of all workers that are held."""
        self._superseded &= listed
        connect = tuple(ref for ref in listed if ref not in streams and ref not in self._superseded)
        missing = [ref for ref, stream in streams.items() if ref not in listed and stream is not StreamState.OPEN]
        self._missing_since_s = {ref: self._missing_since_s.get(ref, now_s) for ref in missing}
        retire = tuple(ref for ref in missing if self._is_given_up(ref, streams[ref], now_s))
        return RosterChange(connect, retire, listed | streams.keys())

    def _is_given_up(self, ref: WorkerRef, stream: StreamState, now_s: float) -> bool:
        return stream is StreamState.ENDED or now_s - self._missing_since_s[ref] >= UNLISTED_S
