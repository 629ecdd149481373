"""Structured logs: one JSON line per event on stderr. Event names are constants in snake_case.

Ids, counts and durations only: never prompt or output text, keys or salts.
"""

import logging
import os
import sys

import structlog


def configure_logs(process: str, level: str = "") -> None:
    """Set up the process's log once. `level` defaults to $PDSERVE_LOG_LEVEL, then to INFO."""
    number = logging.getLevelNamesMapping().get((level or os.environ.get("PDSERVE_LOG_LEVEL", "INFO")).upper(), 20)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.EventRenamer("event"),
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    structlog.contextvars.bind_contextvars(process=process)


def get_logger() -> structlog.typing.FilteringBoundLogger:
    """The process's logger."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger()
    return logger
