"""What the requests of a prefill worker hold. Pure: no IO."""

from collections.abc import Iterable

from common.values.messages import Holding
from prefill_worker.request import PrefillRequest


def holdings_of(requests: Iterable[PrefillRequest], now_s: float) -> list[Holding]:
    """Every request that has blocks."""
    return [
        Holding(
            request.work.attempt_id,
            str(request.phase),
            len(request.block_table),
            now_s - request.arrived_s,
            request.deadline_s - now_s,
            request.message.prefill_try,
        )
        for request in requests
        if request.block_table
    ]
