"""What the router reports about requests, from the events that it delivers. Owns no metric, only when each is due."""

from dataclasses import dataclass
from typing import Protocol

from common.values.ids import RequestId
from router.core.generation import Accepted, Failed, Finished, GenerationEvent, GenerationRequest, Tokens

_PHASES = ("route", "prefill_queue", "prefill", "kv_exposed", "decode_queue", "decode")


class RouterMetrics(Protocol):
    """Where measurements go; `common.telemetry.metrics.Metrics` is one, and names are from its list."""

    def inc(self, name: str, amount: float = 1.0, **labels: str) -> None: ...

    def set(self, name: str, value: float, **labels: str) -> None: ...

    def observe(self, name: str, value: float, **labels: str) -> None: ...


class NullMetrics:
    """Measurements that are discarded."""

    def inc(self, name: str, amount: float = 1.0, **labels: str) -> None:
        pass

    def set(self, name: str, value: float, **labels: str) -> None:
        pass

    def observe(self, name: str, value: float, **labels: str) -> None:
        pass


@dataclass(slots=True)
class _Progress:
    submitted_s: float
    has_output: bool
    last_tokens_s: float | None = None


class RequestMetrics:
    """Follows each live request from submission to its last event."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics
        self._progress: dict[RequestId, _Progress] = {}

    def submitted(self, request: GenerationRequest, now_s: float) -> None:
        self._progress[request.request_id] = _Progress(now_s, request.has_output)

    def delivered(self, request_id: RequestId, event: GenerationEvent, now_s: float) -> None:
        """Account for one event; the last one ends the request."""
        match event:
            case Accepted(prefill_worker_id, decode_worker_id):
                is_local = prefill_worker_id == decode_worker_id
                self._metrics.inc("pdserve_prefills", worker_role="decode" if is_local else "prefill")
            case Tokens(tokens):
                self._tokens(self._progress[request_id], len(tokens), now_s)
                for token in tokens:
                    if token.finish_reason is not None:
                        self._metrics.inc("pdserve_request_finished", finished_reason=token.finish_reason)
            case Finished():
                del self._progress[request_id]
                self._finished(event)
            case Failed(error):
                progress = self._progress.pop(request_id)
                self._metrics.inc("pdserve_requests", status="failed", error_type=error.code)
                if error.code in ("queue_full", "no_ready_pair") and progress.last_tokens_s is None:
                    self._metrics.inc("pdserve_admission_rejections", reason=error.code)

    def _tokens(self, progress: _Progress, num_tokens: int, now_s: float) -> None:
        if not progress.has_output:
            return
        self._metrics.inc("pdserve_generation_tokens", num_tokens)
        if progress.last_tokens_s is None:
            self._metrics.observe("pdserve_time_to_first_token_seconds", now_s - progress.submitted_s)
        else:
            self._metrics.observe("pdserve_inter_token_latency_seconds", now_s - progress.last_tokens_s)
        progress.last_tokens_s = now_s

    def _finished(self, event: Finished) -> None:
        metrics, timings = self._metrics, event.timings
        metrics.inc("pdserve_requests", status="finished", error_type="")
        metrics.inc("pdserve_prompt_tokens", event.num_prompt_tokens)
        metrics.inc("pdserve_prompt_tokens_cached", event.num_cached_tokens)
        metrics.observe("pdserve_request_duration_seconds", timings.wall_s)
        for phase in _PHASES:
            metrics.observe("pdserve_phase_duration_seconds", getattr(timings, f"{phase}_s"), phase=phase)
        if event.num_completion_tokens > 1:
            after_first_s = timings.wall_s - timings.time_to_first_token_s
            per_token_s = after_first_s / (event.num_completion_tokens - 1)
            metrics.observe("pdserve_time_per_output_token_seconds", per_token_s)
        if timings.kv_chunks:
            metrics.observe("pdserve_kv_transfer_seconds", timings.kv_transfer_s)
            metrics.observe("pdserve_kv_transfer_exposed_seconds", timings.kv_exposed_s)
            metrics.observe("pdserve_kv_handover_seconds", timings.kv_exposed_s + timings.decode_queue_s)
            metrics.observe("pdserve_kv_transfer_bytes", timings.kv_bytes)
