"""Reads public traces: Mooncake's JSON lines and Azure's CSV. Times in seconds; no prompt text is in either."""

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

MAX_ROWS = 1_000_000
MAX_TOKENS = 10_000_000


class InvalidTrace(Exception):
    """A file that is no trace; the message names the line."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request. Equal `hash_ids` at the beginning are an equal beginning of the prompt."""

    at_s: float
    num_input_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...] = ()


def read_trace(path: Path, kind: str, max_rows: int = MAX_ROWS) -> list[TraceRow]:
    """The first rows in the order of time. `kind` is mooncake or azure."""
    try:
        with path.open(newline="") as file:
            return sorted(_rows(file, path, _READERS[kind], max_rows), key=lambda row: row.at_s)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidTrace(f"{path}: {error}") from error


def _rows(file: Iterable[str], path: Path, read: "_Reader", max_rows: int) -> Iterator[TraceRow]:
    for number, row in enumerate(read(file), 1):
        if number > max_rows:
            return
        try:
            yield _checked(row())
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidTrace(f"{path}: request {number}: {error!r}") from error


def _checked(row: TraceRow) -> TraceRow:
    if not 0 < row.num_input_tokens <= MAX_TOKENS or not 0 <= row.num_output_tokens <= MAX_TOKENS:
        raise ValueError(f"impossible lengths {row.num_input_tokens} and {row.num_output_tokens}")
    return row


_Reader = Callable[[Iterable[str]], Iterator[Callable[[], TraceRow]]]


def _mooncake(file: Iterable[str]) -> Iterator[Callable[[], TraceRow]]:
    for line in file:
        if line.strip():
            yield lambda line=line: _mooncake_row(json.loads(line))  # type: ignore[misc]


def _mooncake_row(row: dict[str, Any]) -> TraceRow:
    hash_ids = tuple(int(each) for each in row.get("hash_ids", ()))
    return TraceRow(float(row["timestamp"]) / 1000, int(row["input_length"]), int(row["output_length"]), hash_ids)


def _azure(file: Iterable[str]) -> Iterator[Callable[[], TraceRow]]:
    for row in csv.DictReader(file):
        yield lambda row=row: _azure_row(row)  # type: ignore[misc]


def _azure_row(row: dict[str, str]) -> TraceRow:
    # Seven digits of a second: Python reads six.
    at_s = datetime.fromisoformat(row["TIMESTAMP"].split("+")[0][:26]).timestamp()
    return TraceRow(at_s, int(row["ContextTokens"]), int(row["GeneratedTokens"]))


_READERS: dict[str, _Reader] = {"mooncake": _mooncake, "azure": _azure}
