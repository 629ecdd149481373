"""Counts which rows of the transition tables of the handoff cores are executed."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvtransfer.receiver import core as receiver
from kvtransfer.sender import core as sender

TABLES = tuple(
    (module, name)
    for module in (sender, receiver)
    for name in ("TRANSFER_ROWS", "ATTEMPT_ROWS", "PEER_ROWS")
    if hasattr(module, name)
)


class CountedRows(dict[tuple[type, Any], Callable[..., None]]):
    """A table that counts its rows as they are looked up."""

    def __init__(self, table: str, rows: Any) -> None:
        super().__init__(rows)
        self.table = table
        self.counts: Counter[tuple[type, Any]] = Counter()

    def __getitem__(self, row: tuple[type, Any]) -> Callable[..., None]:
        self.counts[row] += 1
        return super().__getitem__(row)

    def get(self, row: tuple[type, Any], default: Any = None) -> Any:
        self.counts[row] += 1
        return super().get(row, default)

    @property
    def missing(self) -> list[str]:
        return [
            f"{self.table}: {event.__name__} while {state}" for event, state in self if not self.counts[event, state]
        ]


@contextmanager
def counted_rows() -> Iterator[list[CountedRows]]:
    """While inside, the cores' tables count."""
    with pytest.MonkeyPatch.context() as patch:
        tables = []
        for module, name in TABLES:
            table = CountedRows(f"{module.__name__}.{name}", getattr(module, name))
            patch.setattr(module, name, table)
            tables.append(table)
        yield tables
