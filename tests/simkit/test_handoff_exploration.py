"""Every reachable state of small handoffs, and every row of the cores' tables; `make explore` does larger handoffs."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from common.engine.executor.one_behind import OneBehind
from kvtransfer.events import TransferEnded
from kvtransfer.receiver.core import ReceiverCore
from kvtransfer.receiver.state import Expectation
from kvtransfer.sender.core import SenderCore
from kvtransfer.sender.state import SenderTransfer, TransferState
from tests.simkit.explorer import Exploration, Violation, explore
from tests.simkit.handoff_world import HandoffWorld
from tests.simkit.handoff_worlds import WORLDS
from tests.simkit.row_counts import CountedRows, counted_rows

# The worlds are explored by whichever test comes first.
pytestmark = pytest.mark.timeout(900)
MAX_STATES = 100_000


@dataclass(frozen=True, slots=True)
class Explored:
    """Results by world, and what their union executed."""

    results: dict[str, Exploration]
    tables: list[CountedRows]


@pytest.fixture(scope="module")
def explored() -> Iterator[Explored]:
    with counted_rows() as tables:
        yield Explored({name: setting.explore(MAX_STATES) for name, setting in WORLDS.items()}, tables)


def test_no_state_is_forbidden_and_every_state_leads_to_an_end(explored: Explored) -> None:
    for name, result in explored.results.items():
        print(f"{name}: {result.num_states} states, {result.num_transitions} transitions, {result.num_quiet} ends")
        assert result.is_complete, name
        assert result.num_quiet > 0, name


def test_every_row_of_every_table_is_executed(explored: Explored) -> None:
    for table in explored.tables:
        print(f"{table.table}: {len(table) - len(table.missing)} of {len(table)} rows, {table.counts.total()} times")
    assert [row for table in explored.tables for row in table.missing] == []


def test_no_event_comes_that_has_no_row(explored: Explored) -> None:
    """The tables that raise for what is not in them were never asked for it."""
    assert [row for table in explored.tables for row in table.counts if row not in table] == []


def test_the_explorer_finds_blocks_given_back_under_a_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sender that ends a cancelled transfer without waiting for its packs: the shortest trace is printed."""

    def end_at_once(self: SenderCore, transfer: SenderTransfer) -> None:
        if transfer.state is TransferState.ENDING:
            self._end(transfer)

    monkeypatch.setattr(SenderCore, "_end_if_unread", end_at_once)
    with pytest.raises(Violation, match="while a pack reads its blocks") as found:
        explore(HandoffWorld({"cancel_prefill": 1}), MAX_STATES)
    assert "!cancel_prefill" in str(found.value)


def test_the_explorer_finds_a_layer_that_is_read_before_every_rank_has_written_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A runner that reports what rank 0 has written."""
    monkeypatch.setattr(OneBehind, "__call__", lambda self, num_layers: self._layer_hook(num_layers))
    with pytest.raises(Violation, match="before every rank has written it"):
        explore(HandoffWorld(num_ranks=2), MAX_STATES)


def test_the_explorer_finds_blocks_given_back_under_a_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver that releases a withdrawn attempt at once."""
    real = ReceiverCore._release_if_unwritten

    def release_at_once(self: ReceiverCore, attempt: Expectation) -> None:
        attempt.num_writes = 0
        real(self, attempt)

    monkeypatch.setattr(ReceiverCore, "_release_if_unwritten", release_at_once)
    with pytest.raises(Violation, match=r"while a write touches its blocks|after it was released|written"):
        explore(HandoffWorld({"withdraw": 1}), MAX_STATES)


def test_the_explorer_finds_a_transfer_that_ends_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    real = SenderCore._end

    def end_twice(self: SenderCore, transfer: SenderTransfer) -> None:
        assert transfer.outcome is not None
        real(self, transfer)
        self._effects.append(TransferEnded(transfer.transfer_id, transfer.outcome))

    monkeypatch.setattr(SenderCore, "_end", end_twice)
    with pytest.raises(Violation, match="ended twice"):
        explore(HandoffWorld(), MAX_STATES)


def test_the_explorer_finds_a_state_without_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver that never acknowledges: the sender's deadline ends it, but not as received."""
    monkeypatch.setattr(SenderCore, "next_deadline_s", lambda self: None)
    monkeypatch.setattr(ReceiverCore, "_complete_if_all_written", lambda self, attempt, transfer: None)
    with pytest.raises(Violation, match="never ended"):
        explore(HandoffWorld(), MAX_STATES)
