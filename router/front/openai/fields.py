"""Fields of the OpenAI API and its dialects that are known and do nothing, or are not offered. Pure: one check.

A field that changes no answer is accepted and ignored. One that is not offered is refused by name unless its value
means "not used": silently dropping it would give an answer that the client did not ask for. Unknown fields
are refused too, with the nearest known name, unless they are null.
"""

import difflib
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Annotated, Any, get_type_hints

import msgspec

from common.values.errors import InvalidRequest, Unsupported

# Types of the fields of a body.
Ignored = Annotated[Any, "ignored"]
NotOffered = Annotated[Any, "not offered"]
# Values besides null that mean the same as leaving the field out.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "add_special_tokens": (False,),
    "allowed_tools": ([],),
    "annotations": ([],),
    "background": (False,),
    "context_management": ([],),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "functions": ([],),
    "function_call": ("none",),
    "include_obfuscation": (False,),
    "modalities": (["text"],),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "stream_interval": (1,),
    "suffix": ("",),
    "truncation": ("disabled",),
    "verbosity": ("medium",),
}
_ADVICE = {
    "conversation": "nothing is kept here: send the items as input",
    "functions": "use tools",
    "function_call": "use tool_choice and tool_calls",
    "previous_response_id": "nothing is kept here: send the items as input",
    "request_id": "send it as the X-Request-Id header",
    "truncate_prompt_tokens": "shorten the prompt",
}


@cache
def fields_of(body_type: type[msgspec.Struct], kind: Any) -> tuple[str, ...]:
    """Names of the fields that are Ignored, or NotOffered."""
    hints = get_type_hints(body_type, include_extras=True)
    return tuple(name for name in body_type.__struct_fields__ if hints[name] == kind)


def refuse_unsupported(body: msgspec.Struct, prefix: str = "") -> None:
    """Raise Unsupported for the first field that is not offered and whose value asks for something."""
    for name in fields_of(type(body), NotOffered):
        check_unused(name, getattr(body, name), prefix)


def check_unused(name: str, value: object, prefix: str = "") -> None:
    """Raise Unsupported when the value of a field that is not offered asks for something."""
    if value is not None and value not in NEUTRAL.get(name, ()):
        advice = f"; {_ADVICE[name]}" if name in _ADVICE else ""
        raise Unsupported(f"{prefix}{name} is not supported yet{advice}", param=prefix + name)


def unknown_field(name: str, path: str, known: Iterable[str]) -> InvalidRequest:
    """The error for an unknown field."""
    name = name[:64]
    near = difflib.get_close_matches(name, list(known), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    param = f"{path}.{name}" if path else name
    return InvalidRequest(f"unknown field {param!r}{hint}", param=param)
