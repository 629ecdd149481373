"""What the requests of a prefill worker hold. Pure: no IO."""

from collections.abc import Iterable

from common.values.messages import BlockHolder
from prefill_worker.request import PrefillRequest


def holders_of(requests: Iterable[PrefillRequest], now_s: float) -> list[BlockHolder]:
    """Every request that has blocks."""
    return [
        BlockHolder(
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
