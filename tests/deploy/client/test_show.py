import json
import subprocess
from typing import Any

from common.values.config import RouterSettings
from deploy.client import show


def worker(worker_id: str, role: str, state: str = "ready") -> dict[str, Any]:
    blocks = {
        f"kv_blocks_{name}": number
        for name, number in zip(("used", "cached", "free", "held", "total"), (1, 20, 300, 4, 325), strict=True)
    }
    return {
        "worker_id": worker_id,
        "role": role,
        "state": state,
        "pid": 17,
        "address": "127.0.0.1:4000",
        "running": 2,
        "waiting": 3,
        **blocks,
    }


def test_workers_are_listed_by_role_with_queues_and_blocks() -> None:
    assert show.workers_table([worker("decode-0", "decode"), worker("prefill-10", "prefill", "draining")]) == [
        "worker      role     state     pid  address         running  waiting  used  cached  free  held  blocks",
        "prefill-10  prefill  draining   17  127.0.0.1:4000        2        3     1      20   300     4     325",
        "decode-0    decode   ready      17  127.0.0.1:4000        2        3     1      20   300     4     325",
    ]


def test_beneath_a_worker_of_several_ranks_stands_each_of_them() -> None:
    ranks = [{"rank": idx, "pid": 17 + idx, "device": "cpu", "silent_s": 4.6 * idx} for idx in range(2)]
    lines = show.workers_table([worker("decode-0", "decode") | {"ranks": ranks}])
    assert [line.split() for line in lines[2:]] == [
        ["rank", "0", "alive", "17", "cpu"],
        ["rank", "1", "silent", "for", "5", "s", "18", "cpu"],
    ]
    assert lines[0].index("pid") + 1 == lines[1].index("17") == lines[3].index("18")
    assert len(show.workers_table([worker("decode-0", "decode") | {"ranks": ranks[:1]}])) == 2


def test_a_pool_without_workers_shows_the_header_alone() -> None:
    assert len(show.workers_table([])) == 1


def test_a_worker_that_is_ready_is_not_loading_any_more_whatever_it_last_said() -> None:
    report = {"worker_id": "decode-0", "role": "decode", "phase": "self-test", "share": 0.0, "elapsed_s": 2.4}
    assert show.loading_lines([report], [worker("decode-0", "decode", "draining")]) == ["decode-0: self-test, for 2 s"]
    assert show.loading_lines([report], [worker("decode-0", "decode")]) == []


def test_pools_are_counted_by_state() -> None:
    workers = [worker("a", "prefill"), worker("b", "prefill", "draining"), worker("c", "prefill")]
    assert show.pools_line(workers, {}) == "prefill: 2 ready, 1 draining; decode: none"


def test_a_worker_that_starts_and_the_wanted_size_are_counted() -> None:
    """After a drain the router sees no worker, and the controller starts one."""
    pools = {"decode": {"desired": 2, "starting": 1}}
    assert show.pools_line([worker("a", "decode")], pools) == "prefill: none; decode: 1 ready, 1 starting of 2"


def test_the_endpoints_hold_a_command_to_copy() -> None:
    text = "\n".join(show.endpoints("http://127.0.0.1:8000", "127.0.0.1:50051", "smol"))
    assert "curl -N http://127.0.0.1:8000/v1/chat/completions" in text
    assert '"model": "smol"' in text
    assert text.endswith("page  http://127.0.0.1:8000/ui/")


def test_the_commands_to_copy_ask_for_more_than_a_decode_worker_prefills_itself() -> None:
    """As a shell would run them: the newcomer is to see a transfer. A number is a token at least."""
    lines = show.endpoints("http://127.0.0.1:1", "127.0.0.1:2", "smol")
    curl = "\n".join(lines[3:6]).replace("curl -N", "printf '%s\\0'")
    generate = lines[6].replace("pdserve generate", "printf '%s\\0'")
    body = _arguments_of(curl)[-1]
    message = json.loads(body)["messages"][0]["content"]
    assert _arguments_of(generate) == ["--chat", message, "--server", "127.0.0.1:2"]
    assert len(message.split()) > RouterSettings().local_prefill_max_tokens


def _arguments_of(printf: str) -> list[str]:
    done = subprocess.run(["bash", "-c", printf], capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


def test_the_controllers_reasons_are_told() -> None:
    autoscale = {
        "problem": "",
        "reason": "2 fits: idle",
        "changes": [{"age_s": 12.3, "from": 1, "to": 2, "reason": "for 5 s at least: 9 sequences"}],
    }
    pool = {"desired": 2, "retry_in_s": 0.0, "last_failure": "", "autoscale": autoscale}
    crashing = {"desired": 1, "retry_in_s": 4.2, "last_failure": "decode-0: no memory", "autoscale": None}
    assert show.controller_lines({"prefill": pool, "decode": crashing}) == [
        "prefill: autoscaled, 2 wanted: 2 fits: idle",
        "prefill: 12 s ago 1 -> 2: for 5 s at least: 9 sequences",
        "decode: next start in 4 s; decode-0: no memory",
    ]
    assert show.controller_lines({}) == []


def test_why_the_autoscaler_decides_nothing_is_told() -> None:
    pool = {"desired": 2, "retry_in_s": 0.0, "last_failure": "", "autoscale": {"problem": "nothing answers"}}
    assert show.controller_lines({"decode": pool}) == ["decode: autoscaled, 2 wanted: nothing answers"]


def test_a_worker_on_its_way_to_another_role_is_told() -> None:
    change = {"worker_id": "decode-1", "from_worker_id": "prefill-1", "age_s": 2.4}
    pool = {"desired": 2, "retry_in_s": 0.0, "last_failure": "", "autoscale": None, "changing": [change]}
    assert show.controller_lines({"decode": pool}) == ["decode: prefill-1 takes this role as decode-1, for 2 s"]
