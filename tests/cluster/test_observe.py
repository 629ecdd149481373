"""What operators look at, on a real cluster with a tiny model: the page, explain, top and bench."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.cluster.cluster import Cluster, running_cluster
from tests.router.observe.collector import Collector
from tests.ui.browser import CHROMEDRIVER, CHROMIUM, ENTER, Browser, browser

KEY = "s3cret-key"
PARTS = ("route_s", "prefill_queue_s", "prefill_s", "kv_exposed_s", "decode_queue_s", "decode_s")


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    started = Collector()
    yield started
    started.close()


@pytest.fixture(scope="module")
def cluster(tiny_model: Path, collector: Collector) -> Iterator[Cluster]:
    """With an admin key, and with small chunks: a prompt takes several prefill steps and several chunks of KV."""
    workers = {"min_chunk_bytes": 2048, "max_num_batched_tokens": 64, "num_blocks": 512, "num_threads": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PDSERVE_ROUTER_ADMIN_KEY", KEY)
        patch.setenv("PDSERVE_ROUTER_OTLP_TRACES_ENDPOINT", collector.url)
        with running_cluster(
            tiny_model, "--local-prefill-max-tokens", "0", config={"prefill_worker": workers, "decode_worker": workers}
        ) as started:
            yield started


def asked(cluster: Cluster, num_words: int = 200) -> str:
    """Ask for a few tokens after a long prompt; the answer's id."""
    body = {"prompt": "the and " * num_words, "max_tokens": 8, "ignore_eos": True}
    reply = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60)
    reply.raise_for_status()
    return str(reply.json()["id"])


def test_a_records_parts_add_up_and_its_kv_chunks_have_times(cluster: Cluster) -> None:
    timings = cluster.get(f"/admin/v1/requests/{asked(cluster)}")["timings"]
    assert sum(timings[part] for part in PARTS) == pytest.approx(timings["wall_s"], abs=1e-3)
    assert len(timings["prefill_chunks"]) > 2
    assert len(timings["kv_ticks"]) == timings["kv_chunks"] > 2
    assert {tuple(tick[1:3]) for tick in timings["kv_ticks"]} == {(0, 1), (1, 2)}
    end_s = sum(timings[part] for part in PARTS[:4])
    assert all(0 <= tick[0] <= end_s + 1e-6 for tick in timings["kv_ticks"])
    assert [tick[0] for tick in timings["kv_ticks"]] == sorted(tick[0] for tick in timings["kv_ticks"])


def test_explain_and_top_show_the_request(cluster: Cluster) -> None:
    request_id = asked(cluster)
    explained = cluster.cli("explain", request_id)
    assert explained.returncode == 0, explained.stderr
    assert f"{request_id}: finished (length)" in explained.stdout
    assert "<- chosen" in explained.stdout
    snapshot = json.loads(cluster.cli("top", "--once", "--json").stdout)
    assert snapshot["requests"][0]["request_id"] == request_id
    assert snapshot["recent"]["num_finished"] >= 1
    assert snapshot["recent"]["transfers"][0]["num_handoffs"] >= 1
    assert "prefill: 1 ready" in cluster.cli("top", "--once").stdout


def test_bench_measures_the_cluster(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    length = ["--input-len", "96", "--output-len", "6", "--dataset", "shared-prefix", "--prefix-len", "64"]
    result = cluster.cli("bench", "--num-requests", "20", "--request-rate", "20", *length, "--result", str(file))
    assert result.returncode == 0, result.stderr
    measured = json.loads(file.read_text())
    assert (measured["completed"], measured["total_input_tokens"], measured["total_output_tokens"]) == (20, 1920, 120)
    assert 0 < measured["median_ttft_ms"] <= measured["p99_ttft_ms"]
    recent = json.loads(cluster.cli("top", "--once", "--json").stdout)["recent"]
    assert recent["prefix_hit_rate"] > 0.2


@pytest.fixture
def tab(tmp_path: Path) -> Iterator[Browser]:
    if CHROMIUM is None or CHROMEDRIVER is None:
        pytest.skip("no chromium and chromedriver on this machine (Debian: apt-get install chromium chromium-driver)")
    with browser(tmp_path) as opened:
        opened.set_window(1400, 1300)
        yield opened


def test_the_page_shows_the_live_cluster(cluster: Cluster, tab: Browser) -> None:
    """1. Give the key.  2. Ask in the chat box.  3. Open where the time went.  4. The waterfall is the record's."""
    tab.open(f"{cluster.url}/ui/")
    tab.wait("return document.querySelector('#key-dialog').open")
    tab.type("#key", KEY + ENTER)
    tab.wait("return document.querySelector('#readiness').textContent === 'ready'")
    tab.wait("return document.querySelectorAll('.workers li').length === 2")
    tab.script("document.querySelector('#message').value = 'the and '.repeat(150)")
    tab.click("#chat [type=submit]")
    tab.wait("return document.querySelector('.bubble.assistant button')")
    tab.click(".bubble.assistant button")
    request_id = tab.wait("return document.querySelector('#detail h3')?.textContent")
    record = cluster.get(f"/admin/v1/requests/{request_id}")
    assert record["status"] == "finished"
    drawn = tab.script("return ['.phase rect', '.chunk', '.tick'].map(s => document.querySelectorAll(s).length)")
    timings = record["timings"]
    seen = [part for part in PARTS if timings[part] > 0.00005]  # 0.0 ms leaves no mark
    assert drawn == [len(seen), len(timings["prefill_chunks"]), len(timings["kv_ticks"])]
    assert "chosen" in tab.text("#detail")
    assert [line for line in tab.console() if line.startswith("SEVERE") and "401" not in line] == []


def test_a_collector_receives_one_connected_trace_over_all_three_roles(cluster: Cluster, collector: Collector) -> None:
    trace_id, span_id = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    headers = {"traceparent": f"00-{trace_id}-{span_id}-01"}
    body = {"prompt": "the and " * 200, "max_tokens": 4, "ignore_eos": True}
    reply = httpx.post(f"{cluster.url}/v1/completions", json=body, headers=headers, timeout=60).json()
    deadline_s = time.monotonic() + 60
    while reply["id"] not in collector.request_ids:
        assert time.monotonic() < deadline_s, "no trace came"
        time.sleep(0.05)
    resources = [each for sent in collector.bodies for each in sent["resourceSpans"]]
    spans = [span for each in resources for span in each["scopeSpans"][0]["spans"] if span["traceId"] == trace_id]
    root = next(span for span in spans if span["parentSpanId"] == span_id)
    assert {span["parentSpanId"] for span in spans if span is not root} == {root["spanId"]}
    assert {"route", "prefill", "kv_transfer", "decode"} <= {span["name"] for span in spans}
    services = {each["resource"]["attributes"][0]["value"]["stringValue"] for each in resources}
    assert services == {"pdserve-router", "pdserve-prefill", "pdserve-decode"}


def test_administration_is_closed_to_everybody_else(cluster: Cluster) -> None:
    assert httpx.get(f"{cluster.url}/admin/v1/state", timeout=60).status_code == 401
    assert httpx.get(f"{cluster.url}/ready", timeout=60).status_code == 200
    assert KEY not in cluster.log_path.read_text()
