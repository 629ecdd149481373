"""Copies of a world of real cores, and a key that is equal for equal states. Pickling, made fast for dataclasses.

A copy keeps which objects are the same one. The key forgets it, so that two equal states get one key whichever way
they came about; a world adds to its key where sameness matters.
"""

import io
import pickle
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from operator import attrgetter
from typing import Any

from common.cores.deadlines import Deadlines

Reducer = Callable[[Any], tuple[Any, ...] | str]


class _Reducers(dict[type, Reducer]):
    """Slotted dataclasses and named tuples are their class called with their fields; the rest is pickled as usual."""

    def __missing__(self, cls: type) -> Reducer:
        self[cls] = reducer = _reducer_of(cls)
        return reducer


def _reducer_of(cls: type) -> Reducer:
    if issubclass(cls, type):  # a class itself, by its name
        return attrgetter("__qualname__")
    if issubclass(cls, tuple):
        return lambda value: (cls, tuple(value))
    if issubclass(cls, Enum):
        return lambda value: (cls, (value.value,))
    if not is_dataclass(cls) or not hasattr(cls, "__slots__"):
        return lambda value: value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    names = [field.name for field in fields(cls)]
    if len(names) < 2:
        return lambda value: (cls, tuple(getattr(value, name) for name in names))
    all_of = attrgetter(*names)
    return lambda value: (cls, all_of(value))


def _deadlines_in_order(deadlines: Deadlines[Any]) -> tuple[Any, ...]:
    """Without the entries that are stale and the numbers that only break ties."""
    entries = sorted((entry, key) for key, entry in deadlines._current.items())
    return tuple, ([(key, deadline_s) for (deadline_s, _), key in entries],)


_REDUCERS = _Reducers()
_KEY_REDUCERS = _Reducers({Deadlines: _deadlines_in_order})


def copy_of(world: object) -> bytes:
    """What `restore` makes an equal world of."""
    return _dump(world, is_key=False)


def restore(copy: bytes) -> Any:
    return pickle.loads(copy)


def key_of(state: object) -> bytes:
    """Equal for equal states, and no other. The state must hold no cycles."""
    return _dump(state, is_key=True)


def _dump(value: object, *, is_key: bool) -> bytes:
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=5)
    pickler.dispatch_table = _KEY_REDUCERS if is_key else _REDUCERS
    pickler.fast = is_key
    pickler.dump(value)
    return buffer.getvalue()
