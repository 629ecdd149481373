"""Bounds on values of any form that clients send for templates and grammars. Pure: no IO."""

from collections.abc import Iterable, Mapping, Sequence

from common.values.errors import InvalidRequest
from router.request import limits


def check_nesting(values: Sequence[object], param: str, max_values: int) -> None:
    """Raise when `values` nest too deeply, or are too many, keys apart."""
    level, num_values = _inside(values), 0
    for _ in range(limits.MAX_JSON_DEPTH):
        num_values += len(level)
        if num_values > max_values:
            raise InvalidRequest(f"{param} holds more than {max_values} values", param=param)
        level = _inside(level)
    if level:
        raise InvalidRequest(f"{param} is nested too deeply", param=param)


def _inside(values: Iterable[object]) -> list[object]:
    """What the containers among `values` hold."""
    inside: list[object] = []
    for value in values:
        if isinstance(value, Mapping):
            inside += value.values()
        elif isinstance(value, list):
            inside += value
    return inside
