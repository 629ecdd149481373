"""Parses JSON bodies into typed structures; a fault becomes an InvalidRequest that names the field. No IO."""

import codecs
import json
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn, TypeVar

import msgspec

from common.values.errors import InvalidRequest
from router.front.openai.fields import unknown_field
from router.request import limits

BodyT = TypeVar("BodyT", bound=msgspec.Struct)

_LOCATED = re.compile(r"(?P<problem>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>.*)`)?", re.DOTALL)
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)
_MISSING_FIELD = re.compile(r"Object missing required field `(?P<name>.*)`")
# The one fault whose text repeats a value; names of fields are repeated on purpose.
_ENUM_VALUE = re.compile(r"Invalid enum value .*", re.DOTALL)
_STEP = re.compile(r"(?P<name>\w+)(?![\w\]])|\[[^]]*\]")  # of a path: a field or an item
_MAX_PROBLEM_LENGTH = 200
_MAX_PLACES = 16  # kinds of objects in a body, and some more


def parse_body(body: bytes, decoder: msgspec.json.Decoder[BodyT]) -> BodyT:
    """Raises InvalidRequest. Numbers are finite, text is valid Unicode, types are exact."""
    body = body.removeprefix(codecs.BOM_UTF8)
    try:
        try:
            return decoder.decode(body)
        except msgspec.ValidationError as error:
            if "unknown field" not in str(error):  # a number may be too large for a second reading
                raise _explained(str(error), decoder.type) from error
            found: BodyT = _without_unknown_nulls(msgspec.json.decode(body), decoder.type, error)
            return found
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        _explain_malformed(body)
        raise InvalidRequest(f"the body is no valid JSON: {str(error)[:_MAX_PROBLEM_LENGTH]}") from error


def converted(value: object, part_type: type[BodyT], path: str) -> BodyT:
    """A part of a body, at `path`, as its structure. Raises InvalidRequest."""
    try:
        return msgspec.convert(value, part_type)
    except msgspec.ValidationError as error:
        found: BodyT = _without_unknown_nulls(value, part_type, error, path)
        return found


def _without_unknown_nulls(value: object, body_type: Any, error: msgspec.ValidationError, outer: str = "") -> Any:
    """A body, or its part at `outer`, without null fields of names that we do not know: clients write all of theirs,
    used or not.

    Raises InvalidRequest for whatever else is wrong.
    """
    for _ in range(_MAX_PLACES):
        if not _drop_nulls(value, str(error)):
            break
        try:
            return msgspec.convert(value, body_type, str_keys=True)
        except msgspec.ValidationError as next_error:
            error = next_error
    raise _explained(str(error), body_type, outer) from error


def _drop_nulls(value: object, message: str) -> bool:
    """Of the object whose unknown field the message names, and of the other items of its lists: null is what a field
    that we know says when it is left out. False: the unknown one is not null."""
    located = _LOCATED.fullmatch(message)
    assert located is not None
    unknown = _UNKNOWN_FIELD.fullmatch(located["problem"])
    if unknown is None:
        return False
    objects: list[object] = [value]
    for part in _STEP.finditer(located["path"] or ""):
        objects = list(_inner(objects, part["name"]))
    holders = [each for each in objects if isinstance(each, dict) and each.get(unknown["name"], each) is None]
    for holder in holders:
        for name in [name for name, stated in holder.items() if stated is None]:
            del holder[name]
    return bool(holders)


def _inner(objects: Iterable[object], name: str | None) -> Iterator[object]:
    """Members of that name; None: items."""
    for each in objects:
        if name is None and isinstance(each, list):
            yield from each
        elif name is not None and isinstance(each, dict) and name in each:
            yield each[name]


def _explained(message: str, body_type: Any, outer: str = "") -> InvalidRequest:
    located = _LOCATED.fullmatch(message)
    assert located is not None
    problem, inner = located["problem"], located["path"] or ""
    path = f"{outer}.{inner}" if outer and inner and not inner.startswith("[") else outer + inner
    if unknown := _UNKNOWN_FIELD.fullmatch(problem):
        known = () if inner else body_type.__struct_fields__
        return unknown_field(unknown["name"], path, known)
    if missing := _MISSING_FIELD.fullmatch(problem):
        param = f"{path}.{missing['name']}" if path else missing["name"]
        return InvalidRequest(f"{param} is missing", param=param)
    problem = _ENUM_VALUE.sub("Invalid enum value", problem)[:_MAX_PROBLEM_LENGTH].replace("`", "")
    problem = problem[0].lower() + problem[1:]
    return InvalidRequest(f"{path}: {problem}" if path else f"the body: {problem}", param=path or None)


def _explain_malformed(body: bytes) -> None:
    """Name the field that holds NaN, an infinity or half a surrogate pair; other faults have no field."""
    if len(body) > limits.MAX_EXPLAINED_BYTES:
        return
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return
    for path, leaf in _leaves(value, ""):
        if isinstance(leaf, float) and not math.isfinite(leaf):
            _refuse(path, "must be a finite number")
        if isinstance(leaf, str) and not _is_encodable(leaf):
            _refuse(path, "holds a lone surrogate, which is no valid Unicode text")


def _leaves(value: object, path: str) -> Iterator[tuple[str, object]]:
    """Every number and string in `value`, keys included, with its path. Not recursive: depth is the client's."""
    waiting: list[tuple[str, object]] = [(path, value)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, dict):
            yield from ((path, key) for key in value)
            waiting.extend((_joined(path, "." if path else "", key), item) for key, item in value.items())
        elif isinstance(value, list):
            waiting.extend((_joined(path, f"[{idx}]"), item) for idx, item in enumerate(value))
        else:
            yield path, value


def _joined(*parts: str) -> str:
    """A path; never long, whatever the client's keys are."""
    return "".join(part[:_MAX_PROBLEM_LENGTH] for part in parts)[:_MAX_PROBLEM_LENGTH]


def _refuse(path: str, problem: str) -> NoReturn:
    path = path.encode(errors="replace").decode()
    raise InvalidRequest(f"{path} {problem}", param=path)


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
