"""Every metric of pdserve, in one list, and the object a process reports through.

Prometheus names with base units; labels are bounded (never a request id, a user or a path). Constant labels of
a process: model_name, role, worker. A metric with an `alias` is also exposed under vLLM's name, which
autoscalers and dashboards in the field already query.
"""

import copy
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest

from common.values.errors import PdserveError

Kind = Literal["counter", "gauge", "histogram"]

# vLLM's buckets, with finer first steps where a small model on a CPU needs them.
# The last edge is the default deadline of a request (router.default_deadline_s).
_LATENCY = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 10, 20, 40, 80, 160, 320, 600),
)
_BYTES = tuple(float(4**power) for power in range(6, 17))
_TOKENS = tuple(float(2**power) for power in range(0, 18))


@dataclass(frozen=True, slots=True)
class Spec:
    name: str
    kind: Kind
    doc: str
    labels: tuple[str, ...] = ()
    alias: str = ""
    buckets: tuple[float, ...] = _LATENCY


METRICS: tuple[Spec, ...] = (
    Spec("pdserve_requests_running", "gauge", "Requests being computed", alias="vllm:num_requests_running"),
    Spec("pdserve_requests_waiting", "gauge", "Requests queued", alias="vllm:num_requests_waiting"),
    Spec("pdserve_waiting_uncached_tokens", "gauge", "Prompt tokens queued that no cache holds"),
    Spec(
        "pdserve_kv_blocks",
        "gauge",
        "KV blocks by state: used, cached, free, held; of layers that see all tokens, if any",
        ("state",),
    ),
    Spec("pdserve_kv_blocks_total", "gauge", "KV blocks of the pool"),
    Spec("pdserve_kv_cache_usage_ratio", "gauge", "Used and held share of the pool", alias="vllm:kv_cache_usage_perc"),
    Spec("pdserve_requests", "counter", "Requests ended, by outcome", ("status", "error_type")),
    Spec(
        "pdserve_request_finished",
        "counter",
        "Choices ended, by finish reason",
        ("finished_reason",),
        alias="vllm:request_success",
    ),
    Spec("pdserve_prefills", "counter", "Prompts placed, by the role of who computes them", ("worker_role",)),
    Spec("pdserve_prompt_tokens", "counter", "Prompt tokens of finished requests", alias="vllm:prompt_tokens"),
    Spec("pdserve_generation_tokens", "counter", "Tokens delivered", alias="vllm:generation_tokens"),
    Spec("pdserve_prompt_tokens_cached", "counter", "Prompt tokens that were not computed for the request"),
    Spec(
        "pdserve_time_to_first_token_seconds",
        "histogram",
        "Arrival to first token",
        alias="vllm:time_to_first_token_seconds",
    ),
    Spec(
        "pdserve_inter_token_latency_seconds",
        "histogram",
        "Between two deliveries of tokens to a request",
        alias="vllm:inter_token_latency_seconds",
    ),
    Spec(
        "pdserve_time_per_output_token_seconds",
        "histogram",
        "Mean time per token after the first, per request",
        alias="vllm:request_time_per_output_token_seconds",
    ),
    Spec(
        "pdserve_request_duration_seconds",
        "histogram",
        "Arrival to last token",
        alias="vllm:e2e_request_latency_seconds",
    ),
    Spec("pdserve_phase_duration_seconds", "histogram", "One phase of the waterfall", ("phase",)),
    Spec("pdserve_kv_transfer_seconds", "histogram", "First chunk announced to last chunk in place"),
    Spec("pdserve_kv_transfer_exposed_seconds", "histogram", "Part of a transfer not hidden behind prefill"),
    Spec("pdserve_kv_handover_seconds", "histogram", "Prompt computed to first decode step, of shipped requests"),
    Spec("pdserve_kv_transfer_bytes", "histogram", "KV bytes of one request", buckets=_BYTES),
    Spec("pdserve_link_bytes_per_second", "gauge", "Speed of the link of the last transfer", ("transport",)),
    Spec("pdserve_kv_slow_transfers", "counter", "Transfers over a link below its floor", ("transport",)),
    Spec("pdserve_kv_transfer_failures", "counter", "Transfers that ended early", ("reason",)),
    Spec("pdserve_request_retries", "counter", "Replacements of a worker within a request", ("reason",)),
    Spec("pdserve_admission_rejections", "counter", "Requests refused at the door", ("reason",)),
    Spec("pdserve_index_lookup_seconds", "histogram", "Prefix index look-up"),
    Spec("pdserve_index_errors", "counter", "Prefix index operations that failed", ("op",)),
    Spec("pdserve_index_stale_hits", "counter", "Prefixes that the index promised and the worker did not have"),
    Spec("pdserve_workers", "gauge", "Workers the router knows", ("worker_role", "state")),
    Spec("pdserve_step_seconds", "histogram", "One forward pass"),
    Spec(
        "pdserve_step_tokens",
        "histogram",
        "Tokens of one forward pass",
        alias="vllm:iteration_tokens_total",
        buckets=_TOKENS,
    ),
    Spec(
        "pdserve_draft_tokens",
        "counter",
        "Tokens guessed and verified",
        alias="vllm:spec_decode_num_draft_tokens",
    ),
    Spec(
        "pdserve_draft_tokens_accepted",
        "counter",
        "Guessed tokens that were right",
        alias="vllm:spec_decode_num_accepted_tokens",
    ),
    Spec("pdserve_draft_tokens_wasted", "counter", "Guessed tokens that were computed in vain"),
    Spec(
        "pdserve_sequence_step_tokens",
        "histogram",
        "Tokens that a sequence got of a step with guesses",
        buckets=tuple(map(float, range(1, 18))),
    ),
    Spec("pdserve_preemptions", "counter", "Sequences put back for lack of blocks", alias="vllm:num_preemptions"),
    Spec("pdserve_traces_dropped", "counter", "Traces that the collector did not take"),
    Spec("pdserve_model_loads", "counter", "Times that this process has read the model's weights"),
    Spec("pdserve_adapter_loads", "counter", "LoRA adapters that a worker read, or could not", ("outcome",)),
    Spec("pdserve_adapters_loaded", "gauge", "LoRA adapters in a worker's memory"),
    Spec("pdserve_adapter_requests", "counter", "Requests for a LoRA adapter", ("adapter",)),
    Spec("pdserve_lives_given_up", "counter", "Lives that a worker ended by itself: frozen, wedged", ("reason",)),
    Spec("pdserve_role_changes", "counter", "Changes to another role, weights kept", ("to_role",)),
    Spec("pdserve_role_change_seconds", "histogram", "A role change, from being asked to being ready"),
    Spec("pdserve_key_file_errors", "counter", "Changed files of keys that could not be used"),
    Spec("pdserve_build_info", "gauge", "Versions, value 1", ("version",)),
)


class Metrics:
    """The metrics of one process. Names not in the list, or other labels, raise at once."""

    def __init__(self, model_name: str, role: str, worker: str) -> None:
        self._registry = CollectorRegistry()
        self._constant = {"model_name": model_name, "role": role, "worker": worker}
        self._metrics = {spec.name: self._create(spec) for spec in METRICS}
        self._children: dict[tuple[object, ...], Any] = {}  # as many as there are labels

    def inc(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Add to a counter."""
        self._child(name, labels).inc(amount)

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        self._child(name, labels).set(value)

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Record one value of a histogram."""
        self._child(name, labels).observe(value)

    def exposition(self) -> bytes:
        """The text that `/metrics` answers, aliases included."""
        return generate_latest(_Aliased(self._registry))

    def serve(self, host: str, port: int) -> "MetricsEndpoint":
        """Answer `/metrics` on a thread of its own; port 0 asks for a free one. Raises PdserveError: it is taken."""
        try:
            return MetricsEndpoint(*start_http_server(port, addr=host, registry=_Aliased(self._registry)))
        except OSError as error:
            reason = error.strerror or str(error)
            message = f"cannot serve metrics on {host}:{port} ({reason}); choose another metrics_port"
            raise PdserveError(message) from error

    def relabeled(self, role: str, worker: str) -> "Metrics":
        """The same process in another role. Gauges start anew; what was counted stays, under the labels it was."""
        other = copy.copy(self)
        other._constant = {**self._constant, "role": role, "worker": worker}
        other._children = {}
        for metric in self._metrics.values():
            if isinstance(metric, Gauge):
                metric.clear()
        return other

    def _create(self, spec: Spec) -> Counter | Gauge | Histogram:
        names = (*self._constant, *spec.labels)
        if spec.kind == "histogram":
            return Histogram(spec.name, spec.doc, names, registry=self._registry, buckets=spec.buckets)
        kind = Counter if spec.kind == "counter" else Gauge
        return kind(spec.name, spec.doc, names, registry=self._registry)

    # prometheus_client's three classes share no type with inc, set and observe; its own look-up takes 5 us.
    def _child(self, name: str, labels: dict[str, str]) -> Any:
        key = (name, *labels.items())
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = self._metrics[name].labels(**self._constant, **labels)
        return child


class MetricsEndpoint:
    """A `/metrics` that is being served. Close it."""

    def __init__(self, server: WSGIServer, thread: threading.Thread) -> None:
        self._server = server
        self._thread = thread

    @property
    def port(self) -> int:
        return self._server.server_port

    def close(self) -> None:
        """Stop listening; returns when the thread has ended."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Aliased(CollectorRegistry):
    """A view of a registry that repeats every metric with an alias under its second name."""

    def __init__(self, source: CollectorRegistry) -> None:
        super().__init__()
        self._source = source

    def collect(self) -> Iterable[Metric]:
        aliases = {spec.name: spec.alias for spec in METRICS if spec.alias}
        for metric in self._source.collect():
            # "_created" samples double the size of a scrape and nothing of ours reads them.
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric
            if metric.name in aliases:
                yield _renamed(metric, aliases[metric.name])


def _renamed(metric: Metric, alias: str) -> Metric:
    renamed = Metric(alias, metric.documentation, metric.type)
    renamed.samples = [sample._replace(name=sample.name.replace(metric.name, alias, 1)) for sample in metric.samples]
    return renamed
