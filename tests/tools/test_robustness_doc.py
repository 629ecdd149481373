"""What the documents say of robustness is what the code has."""

import json
import re

import pytest

from tests.chaos.rows import ROWS
from tests.chaos.runbook import RUNBOOK
from tests.tools import robustness_doc
from tests.tools.named_tests import ROOT, missing, names_of_tests
from tests.tools.robustness_doc import DATA, DOC, PARTS, generated, names_of_parts, state_table

ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text()


def test_the_tables_are_those_of_the_code() -> None:
    text = DOC.read_text()
    assert generated(text) == text, "python -m tests.tools.robustness_doc --write"
    assert sorted(names_of_parts(text)) == sorted(PARTS)


def test_every_test_that_is_named_exists() -> None:
    assert missing(names_of_tests(DOC.read_text() + ARCHITECTURE)) == []


def test_every_promise_names_the_tests_that_hold_it() -> None:
    promises = ARCHITECTURE.split("## Promises\n")[1].split("\n## ")[0]
    rows = [line for line in promises.splitlines() if line.startswith("| ")][2:]
    assert len(rows) >= 10
    assert [row for row in rows if not names_of_tests(row)] == []
    assert len(ARCHITECTURE.splitlines()) <= 150


def test_a_stale_table_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    text = generated(DOC.read_text())
    monkeypatch.setitem(robustness_doc.PARTS, "faults", lambda: iter(["none at all"]))
    assert generated(text) != text


def test_a_state_table_has_a_line_per_event_and_a_column_per_state() -> None:
    lines = list(state_table(robustness_doc.sender.PEER_ROWS))
    assert lines[0] == "| event | absent | connecting | ready | dropping |"
    assert lines[2] == "| PeerReady | - | connected | - | - |"
    assert len(lines) == 5


def test_every_fault_of_the_list_is_in_the_runbook() -> None:
    told = [beginning for entry in RUNBOOK for beginning in entry.rows]
    assert [row.name for row in ROWS if not row.name.startswith(tuple(told))] == []
    assert [beginning for beginning in told if not any(row.name.startswith(beginning) for row in ROWS)] == []


def test_the_runbook_names_metrics_and_log_events_that_exist() -> None:
    packages = ("common", "deploy", "decode_worker", "kvtransfer", "prefill_worker", "router")
    source = "".join(path.read_text() for package in packages for path in (ROOT / package).rglob("*.py"))
    for entry in RUNBOOK:
        for name in re.findall(r"`(pdserve_\w+)`", entry.metrics):
            assert source.count(f'"{name}"') >= 2, f"{name} is declared and set nowhere, or not declared"
        for name in re.findall(r"`([a-z]+_[a-z_]+)`", entry.logs):
            assert f'"{name}"' in source, name


def test_what_was_measured_is_of_the_rows_that_there_are() -> None:
    measured = json.loads((DATA / "chaos.json").read_text())["rows"]
    assert {row["name"] for row in measured} <= {row.name for row in ROWS}
    assert [row["name"] for row in measured if row["verdict"] != "as promised" or not row["proof"]] == []
