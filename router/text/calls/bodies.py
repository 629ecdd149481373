"""How the families of models write one call or several. Each reads what follows the marker that a call begins with."""

import re
from collections.abc import Collection

from router.text.calls.json_scan import Malformed
from router.text.calls.reader import Reader, Reading, loads

_NAME = re.compile(r"[\w.-]{1,128}")
_MAX_NAME_LENGTH = 160
_ARGUMENT_KEYS = ("arguments", "parameters")
_CALL_KEYS = frozenset({"name", "type", "id", *_ARGUMENT_KEYS})


def call_object(reader: Reader, names: Collection[str] = ()) -> Reading[None]:
    """`{"name": ..., "arguments": {...}}`, its members in any order.

    `names` of tools, where it may be any other object as well: then one with another name or member is no call.
    """
    yield from reader.skip_space()
    yield from reader.expect("{")
    yield from reader.skip_space()
    while not (yield from reader.skip("}")):
        key = loads((yield from reader.json_value()))
        if not isinstance(key, str) or (names and key not in _CALL_KEYS):
            raise Malformed
        yield from reader.skip_space()
        yield from reader.expect(":")
        yield from reader.skip_space()
        if key in _ARGUMENT_KEYS:
            yield from _arguments(reader)
        elif key == "name":
            name = loads((yield from reader.json_value()))
            if names and name not in names:
                raise Malformed
            reader.give_name(name)
        else:
            yield from reader.json_value()
        yield from reader.skip_space()
        if not (yield from reader.skip(",")):
            yield from reader.expect("}")
            return
        yield from reader.skip_space()


def named_call(reader: Reader, name: str) -> Reading[None]:
    """The arguments alone, the name being known."""
    if not _NAME.fullmatch(name):
        raise Malformed
    reader.give_name(name)
    yield from reader.skip_space()
    yield from _arguments(reader)


def hermes(reader: Reader, _: str) -> Reading[None]:
    """`<tool_call>{...}</tool_call>`: Hermes, Qwen 2.5 and 3, and many others."""
    if (yield from reader.call(call_object(reader))):
        yield from reader.skip_space()
        yield from reader.close("</tool_call>")
        yield from reader.skip_space()


def llama(reader: Reader, _: str) -> Reading[None]:
    """`<|python_tag|>{...}; {...}`: Llama 3.1 and later."""
    yield from _objects(reader, ())


def bare_llama(reader: Reader, names: Collection[str]) -> Reading[None]:
    """The same without its marker, where an answer begins so and the names are those of tools."""
    reader.mark()
    yield from reader.skip_space()
    if (yield from reader.peek()) == "{":
        yield from _objects(reader, names)
    else:
        reader.give_back()


def _objects(reader: Reader, names: Collection[str]) -> Reading[None]:
    while (yield from reader.call(call_object(reader, names))):
        yield from reader.skip_space()
        reader.mark()
        has_more = yield from reader.skip(";")
        yield from reader.skip_space()
        if (yield from reader.peek()) != "{":
            return reader.give_back() if has_more else reader.settle()
    return None


def mistral(reader: Reader, _: str) -> Reading[None]:
    """`[TOOL_CALLS][{...}, {...}]` until 2024, then `[TOOL_CALLS]name[ARGS]{...}` for each call."""
    yield from reader.skip_space()
    char = yield from reader.peek()
    if char == "[":
        yield from _array(reader)
    elif char == "{":
        yield from reader.call(call_object(reader))
    else:
        yield from reader.call(_mistral_call(reader))
    yield from reader.skip_space()


def _array(reader: Reader) -> Reading[None]:
    yield from reader.skip("[")
    while (yield from reader.call(call_object(reader))):
        yield from reader.skip_space()
        if not (yield from reader.skip(",")):
            return (yield from reader.close("]"))
    return None


def _mistral_call(reader: Reader) -> Reading[None]:
    name, marker = yield from reader.upto(("[ARGS]", "[CALL_ID]"), _MAX_NAME_LENGTH)
    if marker == "[CALL_ID]":
        yield from reader.upto(("[ARGS]",), _MAX_NAME_LENGTH)
    yield from named_call(reader, name.strip())


DEEPSEEK_BEGIN = "<\uff5ctool\u2581calls\u2581begin\uff5c>"
DEEPSEEK_END = "<\uff5ctool\u2581calls\u2581end\uff5c>"
DEEPSEEK_CALL = "<\uff5ctool\u2581call\u2581begin\uff5c>"
DEEPSEEK_CALL_END = "<\uff5ctool\u2581call\u2581end\uff5c>"
DEEPSEEK_SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"


def deepseek(reader: Reader, marker: str) -> Reading[None]:
    """V3 and R1 write the word "function", the name, and JSON in a fence; V3.1 the name and JSON."""
    if marker == DEEPSEEK_BEGIN:
        yield from reader.skip_space()
        if not (yield from reader.skip(DEEPSEEK_CALL)):
            return reader.give_back()
    if not (yield from reader.call(_deepseek_call(reader))):
        return None
    yield from reader.skip_space()
    yield from reader.close("```")
    yield from reader.skip_space()
    yield from reader.close(DEEPSEEK_CALL_END)
    yield from reader.skip_space()
    yield from reader.close(DEEPSEEK_END)
    yield from reader.skip_space()
    return None


def _deepseek_call(reader: Reader) -> Reading[None]:
    name, _ = yield from reader.upto((DEEPSEEK_SEPARATOR,), _MAX_NAME_LENGTH)
    if name.strip() != "function":
        return (yield from named_call(reader, name.strip()))
    name, _ = yield from reader.upto(("\n",), _MAX_NAME_LENGTH)
    yield from reader.expect("```json")
    return (yield from named_call(reader, name.strip()))


def _arguments(reader: Reader) -> Reading[None]:
    """An object; some models write it as the text of one, or null for none."""
    match (yield from reader.peek()):
        case "{":
            yield from reader.json_value(is_arguments=True)
        case '"':
            text = loads((yield from reader.json_value()))
            if not isinstance(text, str) or not isinstance(loads(text), dict):
                raise Malformed
            reader.give_arguments(text)
        case "n":
            yield from reader.json_value()
            reader.give_arguments("{}")
        case "":
            yield from reader.expect("{")
        case _:
            raise Malformed
    reader.end_arguments()
