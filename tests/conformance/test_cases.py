"""The list of cases names tests that exist, and every case has one or a reason."""

import re
from pathlib import Path

from tests.paths import ROOT
from tests.tools.named_tests import missing, names_of_tests

CASES = Path(__file__).with_name("cases.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in CASES.splitlines()
    if re.match(r"\| ([A-Q]-\d\d|\d+) \|", line)
]


def test_every_named_test_exists() -> None:
    assert missing(names_of_tests(CASES)) == []


def test_every_test_named_on_the_page_on_security_exists() -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    assert len(names_of_tests(page)) > 20
    assert [name for name in missing(names_of_tests(page)) if "::" in name] == []


def test_every_case_has_a_test_or_a_reason() -> None:
    assert [row[0] for row in ROWS if not names_of_tests(row[2]) and not row[3]] == []


def test_cases_of_every_area_are_listed_once() -> None:
    names = [row[0] for row in ROWS]
    assert len(set(names)) == len(names)
    assert {name[0] for name in names if "-" in name} == set("ABCDEFGHIJKLMNOPQ")


def test_a_test_that_is_not_there_is_found() -> None:
    named = names_of_tests("`tests/conformance/test_cases.py::test_nothing` and tests/none.py::test_x")
    assert missing(named) == ["tests/conformance/test_cases.py::test_nothing", "tests/none.py::test_x"]
