"""explain and top against a real HTTP front end over a scripted cluster."""

import io
import json
from collections.abc import Iterator

import pytest
from rich.console import Console

from deploy.cli.explain import explain_request, find_record, lines_of, waterfall_of
from deploy.cli.top import bar, screen, watch
from deploy.client.admin import AdminClient, AdminFailed
from tests.ui.page_service import LONG_ID, Served, record, served

KEY = "s3cret"


@pytest.fixture(scope="module")
def page() -> Iterator[Served]:
    with served() as started:
        yield started


def shown(snapshot: dict[str, object]) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(screen(snapshot))
    return console.export_text()


def test_explain_shows_outcome_time_route_and_attempts(page: Served, capsys: pytest.CaptureFixture[str]) -> None:
    explain_request(page.rig.url, LONG_ID, as_json=False)
    text = capsys.readouterr().out
    assert f"{LONG_ID}: finished (stop)" in text
    assert "prompt 2012 tokens (512 cached), answer 64, retries 1" in text
    assert "beam search: 6 beams, the best 5 were returned" in text
    assert "choices: 5, the best 2 by mean logprob were returned" in text
    assert "adapter: legal-v2" in text
    assert "speculation: 31 of 40 drafted tokens accepted" in text
    assert "prefill step 2: 512 tokens, 124.0 ms to 224.0 ms" in text
    assert "KV of 12 chunks in place from 60.0 ms" in text
    assert "link shm, 1.25 GB/s" in text
    assert "prompt computed to first decode step: " in text
    assert "<- chosen: lowest cost" in text
    assert "queue is full" in text
    assert "attempt 0: prefill prefill-0 of 3 ranks, decode decode-0: decode-1 lost: silent for 4 s" in text


def test_explain_prints_the_record_as_json(page: Served, capsys: pytest.CaptureFixture[str]) -> None:
    explain_request(page.rig.url, LONG_ID, as_json=True)
    assert json.loads(capsys.readouterr().out)["request_id"] == LONG_ID


def test_explain_of_an_unknown_request_says_so(page: Served) -> None:
    with pytest.raises(AdminFailed, match="no request 'a/b' is known"):
        explain_request(page.rig.url, "a/b", as_json=False)


def test_explain_takes_an_unambiguous_beginning_or_the_newest(page: Served) -> None:
    client = AdminClient(page.rig.url)
    newest = [str(record["request_id"]) for record in client.records()]
    assert find_record(client, LONG_ID[:12])["request_id"] == LONG_ID
    assert find_record(client, "")["request_id"] == newest[0]
    with pytest.raises(AdminFailed, match=r"2 requests begin with 'req-'|requests begin with 'req-': give more"):
        find_record(client, "req-")


def test_top_shows_ids_that_explain_takes_in_a_terminal_of_80_columns(page: Served) -> None:
    snapshot = next(AdminClient(page.rig.url).snapshots())
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(screen(snapshot, console.width))
    lines = console.export_text().splitlines()
    shown_id = next(line.split()[0] for line in lines if line.startswith("chatcmpl"))
    assert find_record(AdminClient(page.rig.url), shown_id)["request_id"] == LONG_ID
    assert max(map(len, lines)) <= 80
    assert any(line.rstrip().endswith("prefill-0 → decode-0") for line in lines)


def test_the_waterfall_of_a_record_has_its_wall_time() -> None:
    waterfall = waterfall_of(record("r"))
    assert waterfall.wall_s == pytest.approx(1.0)
    assert waterfall.hidden_transfer_s == pytest.approx(0.264)


@pytest.mark.parametrize(
    ("status", "fields", "line"),
    [
        ("running", {"age_s": 2.5, "decisions": []}, "r: running for 2.5 s"),
        ("failed", {"error": "worker_lost", "message": "gone"}, "r: failed, worker_lost: gone"),
    ],
)
def test_requests_without_an_answer_are_explained_too(status: str, fields: dict[str, object], line: str) -> None:
    assert next(lines_of(record("r", status, **fields))) == line
    assert list(lines_of(record("r", status, **fields)))


def test_top_shows_latencies_pools_transfers_and_requests(page: Served, capsys: pytest.CaptureFixture[str]) -> None:
    watch(page.rig.url, once=True, as_json=False)
    text = capsys.readouterr().out
    for part in (
        "TTFT p50 42.1 ms",
        "prefill: 2 ready",
        "decode: 2 ready of 2 wanted",
        "560/1000",
        "480.0 MB/s",
        "req-run",
    ):
        assert part in text, text


def test_top_as_json_is_a_snapshot(page: Served, capsys: pytest.CaptureFixture[str]) -> None:
    watch(page.rig.url, once=True, as_json=True)
    assert set(json.loads(capsys.readouterr().out)) == {
        *("router", "routers", "loading", "index", "events", "state", "pools", "recent", "requests"),
    }


def test_top_names_the_routers_when_there_are_several(page: Served) -> None:
    snapshot = next(AdminClient(page.rig.url).snapshots())
    assert "router-a" in shown(snapshot)
    assert "asked here" not in shown(snapshot)
    other = {**snapshot["routers"][0], "router_id": "[bold]b", "is_ready": False, "num_running": 3, "num_queued": 2}
    snapshot["routers"].append(other)
    lines = shown(snapshot).splitlines()
    assert any("router-a" in line and "asked here" in line for line in lines)
    assert any("[bold]b" in line and "not ready" in line and "3 running 2 queued" in line for line in lines)


def test_top_tells_who_is_on_the_way_to_a_pool(page: Served) -> None:
    snapshot = next(AdminClient(page.rig.url).snapshots())
    snapshot["pools"]["decode"]["changing"] = [{"worker_id": "decode-2", "from_worker_id": "prefill-1", "age_s": 1.0}]
    assert "2 wanted, prefill-1 on the way here" in shown(snapshot)


def test_snapshots_go_on_and_end_with_a_sentence(page: Served) -> None:
    snapshots = AdminClient(page.rig.url).snapshots()
    assert [len(next(snapshots)["state"]["workers"]) for _ in range(2)] == [5, 5]
    with pytest.raises(AdminFailed, match="is pdserve up running"):
        next(AdminClient("http://127.0.0.1:9").snapshots())


def test_a_cluster_without_workers_or_traffic_is_shown(page: Served) -> None:
    snapshot = next(AdminClient(page.rig.url).snapshots())
    snapshot["router"] |= {"is_ready": False, "reasons": ["no decode worker is ready"]}
    snapshot["state"] = {"workers": [], "num_queued": 0, "num_running": 0}
    snapshot["recent"] |= {
        name: None for name in snapshot["recent"] if name.endswith(("rate", "share", "p50_s", "p99_s"))
    }
    snapshot["recent"]["transfers"], snapshot["requests"], snapshot["pools"] = [], [], None
    text = shown(snapshot)
    assert "not ready: no decode worker is ready" in text
    assert "TTFT p50 -  p99 -" in text


@pytest.mark.parametrize(
    ("used", "held", "cached", "text"),
    [
        (0, 0, 0, "·" * 24),
        (1000, 0, 0, "█" * 24),
        (1, 1, 1, "█▓▒" + "·" * 21),
        (500, 100, 200, "█" * 12 + "▓" * 2 + "▒" * 5 + "·" * 5),
        (998, 1, 1, "█" * 24),
    ],
)
def test_block_bars_are_always_as_wide(used: int, held: int, cached: int, text: str) -> None:
    blocks = {"used": used, "held": held, "cached": cached, "free": 1000 - used - held - cached, "total": 1000}
    assert bar({f"kv_blocks_{name}": count for name, count in blocks.items()}).plain == text


def test_the_admin_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(admin_key=KEY) as guarded:
        with pytest.raises(AdminFailed, match="PDSERVE_ROUTER_ADMIN_KEY"):
            AdminClient(guarded.rig.url).state()
        with pytest.raises(AdminFailed, match="PDSERVE_ROUTER_ADMIN_KEY"):
            next(AdminClient(guarded.rig.url).snapshots())
        monkeypatch.setenv("PDSERVE_ROUTER_ADMIN_KEY", KEY)
        assert len(AdminClient(guarded.rig.url).state()["workers"]) == 5
        assert next(AdminClient(guarded.rig.url).snapshots())
