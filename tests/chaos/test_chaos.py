"""A short selection of the fault list, on real clusters; `make chaos` runs the whole."""

from pathlib import Path

import pytest

from tests.chaos import sockets
from tests.chaos.questions import questions_for_chaos
from tests.chaos.rows import ROWS
from tests.chaos.run import run_rows
from tests.tiny_model import write_tiny_model

SHORT = tuple(row for row in ROWS if row.is_short)


@pytest.mark.cluster
@pytest.mark.timeout(600)
@pytest.mark.skipif(not sockets.is_possible(), reason="this machine does not lend descriptors")
def test_the_short_selection_is_as_promised(tmp_path: Path) -> None:
    """Load, fault, proof that it happened, right answers, recovery, healing, books: for each row."""
    model = write_tiny_model(tmp_path / "tiny")
    results = list(run_rows(model, questions_for_chaos(model, seed=0), SHORT, report=print))
    assert [(result.name, result.verdict, result.problems) for result in results] == [
        (result.name, "as promised", []) for result in results
    ]
    assert sorted(result.name for result in results) == sorted(row.name for row in SHORT)
    assert all(result.proof and result.outcomes["right"] for result in results)


def test_every_row_says_what_is_done_and_how_it_is_proven() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert 1 <= row.number <= 40 and row.fault and row.moment and row.proof and row.expected, row
