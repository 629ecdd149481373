"""What becomes of an unexpected exception at the edge: a log line without its text, and an error that names the line.

The text of an exception may hold a client's words, so neither the client nor the log gets to see it.
"""

import secrets
import traceback

from common.telemetry.logs import get_logger
from common.values.errors import PdserveError

_NUM_FRAMES = 4


class InternalError(PdserveError):
    """Something unexpected of ours. The message names an id that the log has too, and nothing else."""


def internal_error(error: Exception) -> InternalError:
    """Log where `error` came from; returns what to tell the client."""
    error_id = secrets.token_hex(6)
    frames = traceback.extract_tb(error.__traceback__)[-_NUM_FRAMES:]
    where = " > ".join(f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in frames)
    get_logger().error("internal_error", error_id=error_id, error_type=type(error).__name__, where=where)
    return InternalError(f"internal error {error_id}")
