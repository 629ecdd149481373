"""What one event sends to the routers about tokens: reports first, then one batch per router. Pure: no IO."""

from collections.abc import Iterable

from common.values.ids import AttemptId, RouterId
from common.values.messages import AttemptTokens, HandoffReport, TokenBatch
from common.values.request import TokenEvent
from common.worker.events import SendToRouter
from decode_worker.request import DecodeRequest


class Outbox:
    """Collects during one `handle`; `flush` empties it."""

    def __init__(self) -> None:
        self._reports: dict[AttemptId, tuple[RouterId, HandoffReport]] = {}
        self._tokens: dict[RouterId, dict[AttemptId, list[TokenEvent]]] = {}
        self._drafts: dict[AttemptId, tuple[int, int]] = {}  # verified, accepted

    def report(self, request: DecodeRequest, local_prefill_s: float) -> None:
        """How the request's prompt came here; once, before its first tokens."""
        transfer = request.transfer
        assert request.started_s is not None
        report = HandoffReport(
            request.attempt_id,
            num_bytes=transfer.num_bytes if transfer else 0,
            num_chunks=transfer.num_chunks if transfer else 0,
            transfer_s=transfer.transfer_s if transfer else 0.0,
            exposed_s=transfer.exposed_s if transfer else 0.0,
            decode_queue_s=request.started_s - request.ready_s,
            num_cached_tokens=request.num_cached_tokens,
            is_local=request.is_local,
            local_prefill_s=local_prefill_s,
            chunks=transfer.chunks if transfer else (),
            transport=transfer.transport if transfer else "",
            link_bytes_per_s=transfer.link_bytes_per_s if transfer else 0.0,
        )
        self._reports[request.attempt_id] = (request.router_id, report)

    def add(self, request: DecodeRequest, events: Iterable[TokenEvent]) -> None:
        attempts = self._tokens.setdefault(request.router_id, {})
        attempts.setdefault(request.attempt_id, []).extend(events)

    def count_drafts(self, request: DecodeRequest, num_drafts: int, num_accepted: int) -> None:
        """What was verified for the tokens that go out with it."""
        before = self._drafts.get(request.attempt_id, (0, 0))
        self._drafts[request.attempt_id] = before[0] + num_drafts, before[1] + num_accepted

    def forget(self, attempt_id: AttemptId) -> None:
        """The request failed or was cancelled: what it made meanwhile is of no use."""
        self._reports.pop(attempt_id, None)
        self._drafts.pop(attempt_id, None)
        for attempts in self._tokens.values():
            attempts.pop(attempt_id, None)

    def flush(self) -> list[SendToRouter]:
        effects = [SendToRouter(router_id, report) for router_id, report in self._reports.values()]
        for router_id, attempts in self._tokens.items():
            if attempts:
                batch = TokenBatch(
                    tuple(
                        AttemptTokens(a, tuple(events), *self._drafts.get(a, (0, 0))) for a, events in attempts.items()
                    )
                )
                effects.append(SendToRouter(router_id, batch))
        self._reports.clear()
        self._drafts.clear()
        self._tokens.clear()
        return effects
