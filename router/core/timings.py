"""The waterfall of a request, from the router's own clock and durations that workers measured. Pure: no IO.

Clocks of two hosts are never compared. Worker durations are cut to fit into what is left of the wall time, in
the order of the phases; decode takes the rest, so the parts always add up to the wall time.
"""

import math

from router.core.generation import RequestTimings
from router.core.request_state import Request


def request_timings(request: Request, now_s: float) -> RequestTimings:
    """The waterfall of a request that ends at `now_s`."""
    marks, report, first = request.marks, request.handoff_report, request.marks.first_tokens
    is_local = report is not None and report.is_local
    dispatched_s = now_s if marks.dispatched_s is None else marks.dispatched_s
    rest = _Rest(now_s - request.arrived_s)
    route_s = rest.take(dispatched_s - request.arrived_s)
    prefill_queue_s = rest.take(first.queue_s) if first and not is_local else 0.0
    first_token_s = now_s if marks.first_token_s is None else marks.first_token_s
    # A decode worker counts from the reservation, which is on its way while this router still counts its route.
    before_first_s = max(0.0, first_token_s - request.arrived_s - route_s)
    local_prefill_s = min(report.local_prefill_s, before_first_s) if report else 0.0
    prefill_s = rest.take(local_prefill_s if is_local else first.prefill_s if first else 0.0)
    kv_exposed_s = rest.take(report.exposed_s) if report and not is_local else 0.0
    decode_queue_s = rest.take(report.decode_queue_s) if report else 0.0
    phases = (route_s, prefill_queue_s, prefill_s, kv_exposed_s, decode_queue_s, rest.left_s)
    return RequestTimings(
        route_s=route_s,
        prefill_queue_s=prefill_queue_s,
        prefill_s=prefill_s,
        kv_transfer_s=_duration(report.transfer_s) if report and not is_local else 0.0,
        kv_exposed_s=kv_exposed_s,
        decode_queue_s=decode_queue_s,
        decode_s=rest.left_s,
        time_to_first_token_s=first_token_s - request.arrived_s,
        wall_s=sum(phases),
        kv_bytes=report.num_bytes if report else 0,
        kv_chunks=report.num_chunks if report else 0,
        num_retries=request.num_retries,
        prefill_chunks=_prefill_chunks(request, dispatched_s - request.arrived_s),
        kv_ticks=_kv_ticks(request, sum(phases[:4])),
        kv_transport=report.transport if report else "",
        kv_link_bytes_per_s=_duration(report.link_bytes_per_s) if report else 0.0,
    )


def _prefill_chunks(request: Request, offset_s: float) -> tuple[tuple[float, float, int], ...]:
    """Chunks on the request's own time line: the prefill worker counts from when it got the prompt."""
    first = request.marks.first_tokens
    if first is None:
        return ()
    return tuple(
        (offset_s + _duration(chunk.start_s), offset_s + _duration(chunk.end_s), chunk.num_tokens)
        for chunk in first.chunks
    )


def _kv_ticks(request: Request, end_s: float) -> tuple[tuple[float, int, int, int], ...]:
    """KV chunks on the request's own time line: the decode worker counts back from when it had everything."""
    report = request.handoff_report
    if report is None:
        return ()
    return tuple(
        (max(0.0, end_s - _duration(chunk.before_end_s)), chunk.layer_start, chunk.layer_end, chunk.num_tokens)
        for chunk in report.chunks
    )


class _Rest:
    """What is left of the wall time."""

    def __init__(self, wall_s: float) -> None:
        self.left_s = max(0.0, wall_s)

    def take(self, duration_s: float) -> float:
        """As much of `duration_s` as is left."""
        taken_s = min(self.left_s, _duration(duration_s))
        self.left_s -= taken_s
        return taken_s


def _duration(seconds: float) -> float:
    """What a peer says is a duration, or a rate: finite and not negative, or nothing."""
    return seconds if math.isfinite(seconds) and seconds > 0.0 else 0.0
