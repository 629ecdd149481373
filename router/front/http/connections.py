"""How many HTTP connections are open at a time: when there is no room, the one that waited longest for a request goes.

Owns the order in which connections began to wait. A connection with a request is never ended for another.
"""

from collections import OrderedDict
from typing import Protocol

from router.observe.request_metrics import NullMetrics, RouterMetrics
from router.request import limits

_NO_METRICS = NullMetrics()


class Connection(Protocol):
    """What is counted."""

    def evict(self) -> None:
        """End, after what has been written."""


class Connections:
    """Of one listener. `max_open` None: as many as come."""

    def __init__(self, max_open: int | None = None, metrics: RouterMetrics = _NO_METRICS) -> None:
        self._max_open = max_open
        self._metrics = metrics
        self._num_open = 0
        self._waiting: OrderedDict[Connection, None] = OrderedDict()  # the longest first

    @property
    def is_crowded(self) -> bool:
        """So many are being refused that there is no time to tell them."""
        return self._max_open is not None and self._num_open > self._max_open + limits.MAX_REFUSED_CONNECTIONS

    def opened(self, connection: Connection) -> bool:
        """Count a new one, until `closed`. False: there is no room, and no waiting connection could make some."""
        self._num_open += 1
        self._waiting[connection] = None
        if self._max_open is None or self._num_open <= self._max_open:
            return True
        longest, _ = self._waiting.popitem(last=False)
        if longest is connection:
            self._metrics.inc("pdserve_admission_rejections", reason="connections")
            return False
        longest.evict()
        return True

    def begins(self, connection: Connection) -> None:
        """It has a request."""
        self._waiting.pop(connection, None)

    def waits(self, connection: Connection) -> None:
        """Its requests are answered."""
        self._waiting[connection] = None

    def closed(self, connection: Connection) -> None:
        """It is gone. Once."""
        self._num_open -= 1
        self._waiting.pop(connection, None)
