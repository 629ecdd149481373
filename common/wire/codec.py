"""Turns values into protobuf messages and back, derived from the value's class by the names and types of its fields.

Done once per class, at import: both directions become one expression each, as fast as if written by hand. A field on
one side only, or of another type on the other side, is a TypeError then. No IO. The forms of a field:

    number, string, bytes, enum        a scalar; an enum is a string
    X | None                           an `optional` field: absent is None
    tuple[X, ...]                      `repeated`; of whole numbers also `bytes`, four each, little-endian
    tuple[tuple[K, V], ...]            a map, sorted by key when decoded; or repeated messages of two fields, in order
    class                              a message; where the message has no field of that name, the fields stand in it
    class with one field, no message   the field itself
"""

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import EnumType
from types import NoneType
from typing import Any, Generic, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from common.values.errors import PeerError

ValueT = TypeVar("ValueT")
MessageT = TypeVar("MessageT", bound=Message)
_SCALARS = {
    FieldDescriptor.CPPTYPE_INT32: int,
    FieldDescriptor.CPPTYPE_INT64: int,
    FieldDescriptor.CPPTYPE_UINT32: int,
    FieldDescriptor.CPPTYPE_UINT64: int,
    FieldDescriptor.CPPTYPE_DOUBLE: float,
    FieldDescriptor.CPPTYPE_FLOAT: float,
    FieldDescriptor.CPPTYPE_BOOL: bool,
}


@dataclass(frozen=True, slots=True)
class Codec(Generic[ValueT, MessageT]):
    """`decode` raises PeerError for what no value of ours becomes; ranges of the fields are the sender's business."""

    encode: Callable[[ValueT], MessageT]
    decode: Callable[[MessageT], ValueT]


def derive(value_class: type[ValueT], message_class: type[MessageT]) -> Codec[ValueT, MessageT]:
    """Raises TypeError, naming the field, when the two classes do not have the same fields."""
    writer = _Writer()
    message: Any = message_class.DESCRIPTOR  # its two implementations have no common type
    encode = eval(f"lambda v: {writer.encoded(value_class, message, 'v')}", writer.names)
    decode = eval(f"lambda m: {writer.decoded(value_class, message, 'm')}", writer.names)
    return Codec(encode, _guarded(decode))


def _guarded(decode: Callable[[MessageT], ValueT]) -> Callable[[MessageT], ValueT]:
    def guarded(message: MessageT) -> ValueT:
        try:
            return decode(message)
        except ValueError as error:  # an enum's value that we do not know
            raise PeerError(f"malformed {message.DESCRIPTOR.name}: {error}") from error

    return guarded


class _Writer:
    """Writes the expressions. Owns the names that they use."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {"packed": _packed, "unpacked": _unpacked}
        self._num_loops = 0

    def encoded(self, value_class: type, message: Descriptor, value: str) -> str:
        """An expression for the message that `value`, an expression for an object of `value_class`, becomes."""
        arguments = list(self._arguments(value_class, message, value))
        names = [name for name, _ in arguments]
        if extra := sorted({field.name for field in message.fields} ^ set(names)) or len(names) != len(set(names)):
            raise TypeError(f"{value_class.__name__} and {message.full_name} differ in {extra}")
        return f"{self._name(GetMessageClass(message))}({', '.join(f'{name}={each}' for name, each in arguments)})"

    def _arguments(self, value_class: type, message: Descriptor, value: str) -> Iterator[tuple[str, str]]:
        for name, kind in _fields_of(value_class):
            field = message.fields_by_name.get(name)
            if field is not None:
                yield name, self._encoded_field(kind, field, f"{value}.{name}")
            elif _is_class(kind):
                yield from self._arguments(kind, message, f"{value}.{name}")
            else:
                raise TypeError(f"{value_class.__name__}.{name} is no field of {message.full_name}")

    def _encoded_field(self, kind: Any, field: FieldDescriptor, value: str) -> str:
        kind, _ = _without_none(kind, field)
        if _is_map(field):
            kind, value = _unwrapped(kind, value)
            for each, part in _parts(get_args(kind)[0], field):
                _check_scalar(each, part)
            return f"dict({value})"
        if field.is_repeated:
            item = self._loop_name()
            each = self._encoded_item(get_args(kind)[0], field, item)
            return value if each == item else f"[{each} for {item} in {value}]"
        return self._encoded_item(kind, field, value)

    def _encoded_item(self, kind: Any, field: FieldDescriptor, value: str) -> str:
        if _is_packed(kind, field):
            return f"packed({value})"
        if field.message_type is None:
            _check_scalar(kind, field)
            return value
        if get_origin(kind) is not tuple:
            return self.encoded(kind, field.message_type, value)
        items = [
            f"{part.name}={self._encoded_field(each, part, f'{value}[{at}]')}"
            for at, (each, part) in enumerate(_parts(kind, field))
        ]
        return f"{self._name(GetMessageClass(field.message_type))}({', '.join(items)})"

    def decoded(self, value_class: type, message: Descriptor, source: str) -> str:
        """The inverse: an expression for the object that `source`, a message, becomes."""
        values = []
        for name, kind in _fields_of(value_class):
            field = message.fields_by_name.get(name)
            values.append(
                self.decoded(kind, message, source) if field is None else self._decoded_field(kind, field, source)
            )
        return f"{self._name(value_class)}({', '.join(values)})"

    def _decoded_field(self, kind: Any, field: FieldDescriptor, source: str) -> str:
        kind, is_optional = _without_none(kind, field)
        value = f"{source}.{field.name}"
        if _is_map(field):
            pairs = f"tuple(sorted({value}.items()))"
            return f"{self._name(kind)}({pairs})" if _is_class(kind) else pairs
        if field.is_repeated:
            item = self._loop_name()
            each = self._decoded_item(get_args(kind)[0], field, item)
            return f"tuple({value})" if each == item else f"tuple([{each} for {item} in {value}])"
        decoded = self._decoded_item(kind, field, value)
        return f"({decoded} if {source}.HasField({field.name!r}) else None)" if is_optional else decoded

    def _decoded_item(self, kind: Any, field: FieldDescriptor, value: str) -> str:
        if isinstance(kind, EnumType):
            return f"{self._name(kind)}({value})"
        if _is_packed(kind, field):
            return f"unpacked({value})"
        if field.message_type is None:
            return value
        if get_origin(kind) is not tuple:
            return self.decoded(kind, field.message_type, value)
        items = [self._decoded_field(each, part, value) for each, part in _parts(kind, field)]
        return f"({', '.join(items)},)"

    def _name(self, thing: type) -> str:
        name = f"{thing.__name__}_{thing.__module__.replace('.', '_')}"
        self.names[name] = thing
        return name

    def _loop_name(self) -> str:
        self._num_loops += 1
        return f"item{self._num_loops}"


def _fields_of(value_class: type) -> list[tuple[str, Any]]:
    """Names and types, in the order in which the class takes them; NewTypes as what they are made of."""
    return [(name, getattr(kind, "__supertype__", kind)) for name, kind in get_type_hints(value_class).items()]


def _unwrapped(kind: Any, value: str) -> tuple[Any, str]:
    """What a class with one field holds; anything else as it is."""
    if not _is_class(kind):
        return kind, value
    ((name, only),) = _fields_of(kind)
    return only, f"{value}.{name}"


def _is_class(kind: Any) -> bool:
    return isinstance(kind, type) and hasattr(kind, "__annotations__") and not isinstance(kind, EnumType)


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def _is_packed(kind: Any, field: FieldDescriptor) -> bool:
    return field.type == FieldDescriptor.TYPE_BYTES and get_args(kind) == (int, ...)


def _parts(kind: Any, field: FieldDescriptor) -> Iterator[tuple[Any, FieldDescriptor]]:
    """The types of a tuple of fixed length, each with its field of the message."""
    assert field.message_type is not None
    return zip(get_args(kind), field.message_type.fields, strict=True)


def _without_none(kind: Any, field: FieldDescriptor) -> tuple[Any, bool]:
    """The type, and whether it may be None. An `optional` field must be one that may, and only such a one."""
    others = [each for each in get_args(kind) if each is not NoneType]
    is_optional = NoneType in get_args(kind)
    if is_optional != (field.has_presence and field.message_type is None):
        raise TypeError(f"{field.full_name} is {'not ' * is_optional}optional, but its value is {kind}")
    return (others[0], True) if is_optional else (kind, False)


def _check_scalar(kind: Any, field: FieldDescriptor) -> None:
    kind = getattr(kind, "__supertype__", kind)
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        is_right = kind is bytes if field.type == FieldDescriptor.TYPE_BYTES else issubclass(kind, str)
    else:
        is_right = kind is _SCALARS[field.cpp_type]
    if not is_right:
        raise TypeError(f"{field.full_name} does not hold a {kind}")


def _packed(token_ids: tuple[int, ...]) -> bytes:
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def _unpacked(packed: bytes) -> tuple[int, ...]:
    if len(packed) % 4:
        raise ValueError(f"expected token ids of 4 bytes each, got {len(packed)} bytes")
    return struct.unpack(f"<{len(packed) // 4}I", packed)
