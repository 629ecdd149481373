"""The names by which processes, requests and transfers know one another. Pure: no IO."""

from typing import NamedTuple, NewType

RequestId = NewType("RequestId", str)
RouterId = NewType("RouterId", str)
BlockHash = NewType("BlockHash", bytes)


class WorkerRef(NamedTuple):
    """One life of a worker: a restarted worker keeps its id and draws a new incarnation."""

    worker_id: str
    incarnation: str

    def __str__(self) -> str:
        return f"{self.worker_id}#{self.incarnation}"

    @classmethod
    def parse(cls, text: str) -> "WorkerRef":
        """Inverse of `str`. Raises ValueError when `text` has no incarnation."""
        worker_id, separator, incarnation = text.rpartition("#")
        if not separator:
            raise ValueError(f"worker reference without incarnation: {text!r}")
        return cls(worker_id, incarnation)


class AttemptId(NamedTuple):
    """One placement of a request on a decode worker. A replay after a decode worker's death is a new attempt."""

    request_id: RequestId
    attempt: int

    def __str__(self) -> str:
        return f"{self.request_id}/{self.attempt}"


class TransferId(NamedTuple):
    """One try of a prefill worker to fill the blocks that a decode worker granted to an attempt."""

    attempt_id: AttemptId
    prefill_try: int

    def __str__(self) -> str:
        return f"{self.attempt_id}/{self.prefill_try}"
