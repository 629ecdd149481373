"""What an operator reads of a worker that ended: the cause, not Ray's wrapping."""

import pytest

from deploy.ray.pools import reason_of

CREATION = """The actor died because of an error raised in its creation task, ray::WorkerActor.__init__() (pid=31631)
  File "/app/common/kv/cache.py", line 8, in <module>
    from common.engine.kv.fence import Fence
ModuleNotFoundError: No module named 'common.engine.kv.fence'
"""
KILLED = """The actor died unexpectedly before finishing this task.
\tclass_name: WorkerActor
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: killed by 9
"""


CRASHED = """The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail:
it exits with code 2. End of file. Some common causes include: (1) the process was killed by the OOM killer
"""


class Wrapped(Exception):
    """As Ray's RayTaskError: the worker's own error inside."""

    cause = MemoryError("no room for 65536 blocks")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError(CREATION), "ModuleNotFoundError: No module named 'common.engine.kv.fence'"),
        (RuntimeError(KILLED), "its process died: killed by 9"),
        (RuntimeError(CRASHED), "its process died: it exits with code 2. End of file."),
        (Wrapped("x" * 900), "MemoryError: no room for 65536 blocks"),
        (RuntimeError("one line\nadvice"), "one line"),
        (RuntimeError(""), "RuntimeError"),
    ],
    ids=["creation", "killed", "crashed", "own error", "one line", "nothing"],
)
def test_the_cause_is_told(error: Exception, reason: str) -> None:
    assert reason_of(error) == reason


def test_a_reason_is_bounded() -> None:
    assert len(reason_of(RuntimeError("x" * 5000))) == 400
