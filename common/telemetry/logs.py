"""Structured logs: one JSON line per event on stderr. Event names are constants in snake_case.

Ids, counts and durations only: never prompt or output text, keys or salts.
"""

import json
import logging
import os
import sys
from functools import partial
from typing import Any, TextIO, cast

import structlog

# Made once: `json.dumps` would make one for every line.
_encoder = json.JSONEncoder(default=str)
_bound: list[structlog.typing.FilteringBoundLogger] = []  # by `configure_logs`


class LossyStream:
    """Writes whole lines to another stream; what cannot be written is lost, and how much that was is said when it can
    be again.

    Work must not fail because its log does: the disk may be full. `print` writes a line's end by itself: it is written
    together with its line, or lines of threads and processes that share the stream would run into one another.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._line = ""
        self._num_lost = 0

    def write(self, text: str) -> int:
        self._line += text
        if text.endswith("\n"):
            line, self._line = self._line, ""
            self._write_line(line)
        return len(text)

    def flush(self) -> None:
        """`write` has done it, up to the last line's end."""

    def _write_line(self, line: str) -> None:
        try:
            if self._num_lost:
                lost = {"num_lost": self._num_lost, "level": "warning", "event": "log_lines_lost"}
                self._stream.write(f"{json.dumps(lost)}\n")
            self._stream.write(line)
            self._stream.flush()
        except OSError:
            self._num_lost += 1
        else:
            self._num_lost = 0


def configure_logs(process: str, level: str = "") -> None:
    """Set up the process's log once. `level` defaults to $PDSERVE_LOG_LEVEL, then to INFO."""
    number = logging.getLevelNamesMapping().get((level or os.environ.get("PDSERVE_LOG_LEVEL", "INFO")).upper(), 20)
    structlog.configure(
        processors=[
            partial(_add_process, process),
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.EventRenamer("event"),
            structlog.processors.JSONRenderer(_to_json),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, LossyStream(sys.stderr))),
    )
    _bound.append(structlog.get_logger().bind())


def get_logger() -> structlog.typing.FilteringBoundLogger:
    """The process's logger. Bound once set up: structlog's own binds anew for every line, at the price of a line."""
    logger: structlog.typing.FilteringBoundLogger = _bound[-1] if _bound else structlog.get_logger()
    return logger


def _add_process(process: str, _logger: object, _method: str, event: Any) -> Any:
    event["process"] = process
    return event


def _to_json(event: object, **_options: object) -> str:
    return _encoder.encode(event)
