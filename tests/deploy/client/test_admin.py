"""status, scale and drain against a scripted router, over real HTTP."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from deploy.cli.commands import run_drain, run_scale, show_status
from deploy.client.admin import AdminClient, AdminFailed, Unhealthy
from deploy.client.waiting import missing_of_all, wait_for_sizes, wait_until_settled

ROUTER = {
    "router_id": "router-a", "is_ready": True, "pid": 9, "http_url": "http://127.0.0.1:8000",
    "grpc_address": "127.0.0.1:50051", "num_running": 4, "num_queued": 3,
}  # fmt: skip


LOADING = {"worker_id": "decode-7", "role": "decode", "phase": "reading weights", "share": 0.43, "elapsed_s": 12.4}

CHANGE = {"worker_id": "decode-1", "from_worker_id": "prefill-1", "age_s": 1.5}


class ScriptedRouter:
    """A cluster that does at each look what it was asked for before."""

    def __init__(self) -> None:
        self.sizes = {"prefill": 1, "decode": 1}
        self.wanted = dict(self.sizes)
        self.incarnation = "a"
        self.drained: list[tuple[str, Any]] = []
        self.is_stuck = False
        self.is_ready = True

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        match method, path.removeprefix("/admin/v1/").split("/"):
            case "GET", ["state"]:
                return 200, self._state()
            case "GET", ["", "ready"]:
                return (200, {"status": "ready", "reasons": []}) if self.is_ready else (503, self._not_ready())
            case "POST", ["pools"]:
                self.wanted |= body
                return 202, {}
            case "POST", ["workers", worker_id, "drain"]:
                self.drained.append((worker_id, body))
                self.incarnation = "b"
                return 202, {}
        return 404, {"error": {"message": f"no {path} here"}}

    def _state(self) -> dict[str, Any]:
        workers = [self._worker(role, idx) for role, size in self.sizes.items() for idx in range(size)]
        moving = [CHANGE] if self.sizes != self.wanted else []
        pools = {"decode": {"desired": self.wanted["decode"], "retry_in_s": 0, "changing": moving}}
        if not self.is_stuck:
            self.sizes = dict(self.wanted)
        load = {"num_queued": 3, "num_running": 4}
        return {"workers": workers, **load, "pools": pools, "routers": [ROUTER], "loading": [LOADING]}

    def _worker(self, role: str, idx: int) -> dict[str, Any]:
        return {"worker_id": f"{role}-{idx}", "incarnation": self.incarnation, "role": role, "state": "ready"}

    @staticmethod
    def _not_ready() -> dict[str, Any]:
        return {"status": "not ready", "reasons": ["no decode worker"]}


def test_the_admin_api_is_asked_without_a_proxy(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert len(AdminClient(url).state()["workers"]) == 2


@pytest.fixture
def router() -> ScriptedRouter:
    return ScriptedRouter()


@pytest.fixture
def url(router: ScriptedRouter) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            status, answer = router.answer(self.command, self.path, body)
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_scale_sets_each_pool_and_returns_when_it_has_the_size(
    router: ScriptedRouter, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run_scale(url, {"prefill": 2, "decode": 3}, timeout_s=20, as_json=False)
    assert router.sizes == {"prefill": 2, "decode": 3}
    output = capsys.readouterr()
    assert output.out == "done: prefill has 2, decode has 3\n"
    assert "prefill 1 ready of 2, decode 1 ready of 3, prefill-1 changes to decode-1" in output.err


def test_scale_as_json_prints_the_sizes(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    run_scale(url, {"decode": 2}, timeout_s=20, as_json=True)
    assert json.loads(capsys.readouterr().out) == {"decode": 2}


def test_scale_that_does_not_happen_is_unhealthy(router: ScriptedRouter, url: str) -> None:
    router.is_stuck = True
    with pytest.raises(Unhealthy, match="decode 1 ready of 2"):
        wait_for_sizes(AdminClient(url), {"decode": 2}, timeout_s=0.0, report=lambda text: None)


def test_drain_returns_when_that_life_of_the_worker_is_over(
    router: ScriptedRouter, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The pool replaces it at once: a worker of that name is still there."""
    run_drain(url, "decode-0", 7.0, timeout_s=20)
    assert router.drained == [("decode-0", {"grace_s": 7.0})]
    assert "decode-0 is gone" in capsys.readouterr().out


def test_scale_may_return_at_once(router: ScriptedRouter, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    router.is_stuck = True
    run_scale(url, {"decode": 2}, timeout_s=0.0, as_json=False, is_waiting=False)
    assert capsys.readouterr().out == "asked: decode is to have 2\n"


def test_status_and_drain_wait_for_the_pool_to_be_whole_again(
    router: ScriptedRouter, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The scripted pool has its size at the second look."""
    router.wanted["decode"] = 2
    assert show_status(url, as_json=False, wait_s=20.0) == 0
    assert router.sizes["decode"] == 2
    assert "==> status: prefill 1 ready of 1, decode 1 ready of 2" in capsys.readouterr().err
    router.wanted["decode"] = 3
    run_drain(url, "decode-0", None, timeout_s=20, is_waiting=True)
    assert router.sizes["decode"] == 3
    assert "decode-0 was replaced" in capsys.readouterr().out


def test_waiting_ends_unhealthy_with_what_is_missing(router: ScriptedRouter, url: str) -> None:
    router.is_ready = False
    with pytest.raises(Unhealthy, match="after 0 s: no decode worker"):
        wait_until_settled(AdminClient(url), 0.0, lambda text: None)


def test_without_a_controller_all_workers_are_waited_for() -> None:
    """As where deployments place workers themselves: a draining or loading one is not settled."""
    ready = {"role": "decode", "state": "ready"}
    state = {"workers": [ready, {"role": "decode", "state": "draining"}], "pools": None}
    assert missing_of_all(state, {"status": "ready"}) == "prefill 0 ready of 0, decode 1 ready of 2"
    assert missing_of_all({"workers": [ready], "pools": None}, {"status": "ready"}) == ""


def test_drain_of_an_unknown_worker_fails_by_name(url: str) -> None:
    with pytest.raises(AdminFailed, match="no worker 'decode-7'"):
        run_drain(url, "decode-7", None, timeout_s=1)


def test_status_tells_healthy_from_unhealthy(
    router: ScriptedRouter, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert show_status(url, as_json=False) == 0
    text = capsys.readouterr().out
    assert "prefill: 1 ready; decode: 1 ready of 1" in text
    assert "decode-7: reading weights, 43 %, for 12 s" in text
    assert "router-a  ready    9  http://127.0.0.1:8000  127.0.0.1:50051        4       3" in text
    router.is_ready = False
    assert show_status(url, as_json=False) == 3
    assert "not ready: no decode worker" in capsys.readouterr().out
    assert show_status(url, as_json=True) == 3
    assert json.loads(capsys.readouterr().out)["ready"] is False


def test_an_error_of_the_router_is_passed_on(url: str) -> None:
    with pytest.raises(AdminFailed, match="no /admin/v1/events here"):
        AdminClient(url).model_name()


def test_no_router_is_explained() -> None:
    with pytest.raises(AdminFailed, match="is pdserve up running"):
        AdminClient("http://127.0.0.1:9").state()
