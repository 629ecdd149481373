"""The metric list: names, aliases, labels."""

import re
import socket
import urllib.request

import pytest

from common.telemetry.metrics import METRICS, Metrics
from common.values.config import RouterConfig
from tests.paths import ROOT


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("model", "decode", "decode-0")


def test_every_name_is_ours_and_in_base_units() -> None:
    for spec in METRICS:
        assert re.fullmatch(r"pdserve_[a-z_]+", spec.name), spec.name
        assert not spec.name.endswith(("_ms", "_mb", "_total_total")), spec.name
        assert spec.kind != "histogram" or spec.name.endswith(("_seconds", "_bytes", "_tokens", "_per_sequence")), (
            spec.name
        )


def test_names_and_aliases_are_unique() -> None:
    names = [spec.name for spec in METRICS] + [spec.alias for spec in METRICS if spec.alias]
    assert len(names) == len(set(names))


def test_labels_are_bounded() -> None:
    """1. No label may carry a value that a client chooses."""
    allowed = {"state", "status", "error_type", "finished_reason", "phase", "reason", "op", "worker_role", "version"}
    allowed |= {"to_role", "transport", "outcome"}
    allowed.add("adapter")  # which operators name, no more than `limits.MAX_ADAPTERS`
    assert {label for spec in METRICS for label in spec.labels} <= allowed


def test_a_value_appears_under_its_name_and_its_alias(metrics: Metrics) -> None:
    metrics.set("pdserve_requests_running", 3)
    metrics.inc("pdserve_generation_tokens", 5)
    text = metrics.exposition().decode()
    labels = '{model_name="model",role="decode",worker="decode-0"}'
    assert f"pdserve_requests_running{labels} 3.0" in text
    assert f"vllm:num_requests_running{labels} 3.0" in text
    assert f"pdserve_generation_tokens_total{labels} 5.0" in text
    assert f"vllm:generation_tokens_total{labels} 5.0" in text


def test_no_creation_timestamps_are_exposed(metrics: Metrics) -> None:
    metrics.inc("pdserve_generation_tokens")
    assert "_created" not in metrics.exposition().decode()


def test_an_unlisted_metric_is_refused(metrics: Metrics) -> None:
    with pytest.raises(KeyError):
        metrics.inc("pdserve_made_up")


def test_a_wrong_label_is_refused(metrics: Metrics) -> None:
    with pytest.raises(ValueError, match="label"):
        metrics.inc("pdserve_preemptions", user="alice")


def test_a_scrape_over_http_answers_the_exposition(metrics: Metrics) -> None:
    metrics.set("pdserve_requests_waiting", 7)
    endpoint = metrics.serve("127.0.0.1", 0)
    with urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/metrics", timeout=60) as response:
        assert b"vllm:num_requests_waiting" in response.read()
    endpoint.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", endpoint.port), timeout=60)


def test_a_change_of_role_keeps_what_was_counted_and_drops_gauges_of_the_old_role(metrics: Metrics) -> None:
    metrics.inc("pdserve_generation_tokens", 5)
    metrics.set("pdserve_kv_blocks_total", 9)
    other = metrics.relabeled("prefill", "prefill-1")
    other.inc("pdserve_generation_tokens", 2)
    other.set("pdserve_kv_blocks_total", 4)
    lines = [line for line in other.exposition().decode().splitlines() if not line.startswith("#")]
    found = {line.partition("{")[0] + line.partition("role=")[2] for line in lines}
    assert 'pdserve_generation_tokens_total"decode",worker="decode-0"} 5.0' in found
    assert 'pdserve_generation_tokens_total"prefill",worker="prefill-1"} 2.0' in found
    assert [name for name in found if name.startswith("pdserve_kv_blocks_total")] == [
        'pdserve_kv_blocks_total"prefill",worker="prefill-1"} 4.0'
    ]


def test_every_metric_is_set_by_something() -> None:
    """One that is declared, drawn and alerted on but set nowhere tells operators that all is well."""
    root = ROOT
    packages = ("common", "decode_worker", "deploy", "kvtransfer", "prefill_worker", "router")
    source = "".join(path.read_text() for package in packages for path in (root / package).rglob("*.py"))
    assert [spec.name for spec in METRICS if source.count(f'"{spec.name}"') < 2] == []


def test_the_edges_of_durations_reach_the_default_deadline() -> None:
    """What lasts up to it falls between two edges, not beyond the last."""
    default_deadline_s = RouterConfig.model_fields["default_deadline_s"].default
    for name in ("pdserve_request_duration_seconds", "pdserve_time_to_first_token_seconds"):
        (spec,) = [spec for spec in METRICS if spec.name == name]
        assert max(spec.buckets) >= default_deadline_s
