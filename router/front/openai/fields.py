"""Which fields of the OpenAI API and its dialects are known and not offered. Pure data and one check.

Such a field is refused by name unless its value means "not used": silently dropping one would give an answer that
the client did not ask for. Fields that nobody knows are refused too, with the nearest known name.
"""

import difflib
from collections.abc import Iterable
from typing import Any

import msgspec

from common.values.errors import InvalidRequest, Unsupported

# Values besides null that mean the same as leaving the field out.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "allowed_tools": ([],),
    "annotations": ([],),
    "best_of": (1,),
    "continue_final_message": (False,),
    "continuous_usage_stats": (False,),
    "documents": ([],),
    "functions": ([],),
    "function_call": ("none",),
    "include_obfuscation": (False,),
    "include_reasoning": (True,),
    "length_penalty": (1, 1.0),
    "metadata": ({},),
    "modalities": (["text"],),
    "n_best": (1,),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "stream_interval": (1,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tool_calls": ([],),
    "tools": ([],),
    "use_beam_search": (False,),
}
_ADVICE = {
    "best_of": "use n",
    "request_id": "send it as the X-Request-Id header",
    "truncate_prompt_tokens": "shorten the prompt",
}


def refuse_unsupported(body: msgspec.Struct, fields: Iterable[str], prefix: str = "") -> None:
    """Raise Unsupported for the first of `fields` whose value asks for something."""
    for name in fields:
        check_unused(name, getattr(body, name), prefix)


def check_unused(name: str, value: object, prefix: str = "") -> None:
    """Raise Unsupported when the value of a field that is not offered asks for something."""
    if value is not None and value not in _NEUTRAL.get(name, ()):
        advice = f"; {_ADVICE[name]}" if name in _ADVICE else ""
        raise Unsupported(f"{prefix}{name} is not supported yet{advice}", param=prefix + name)


def unknown_field(name: str, path: str, known: Iterable[str]) -> InvalidRequest:
    """The error for a field that nobody knows."""
    name = name[:64]
    near = difflib.get_close_matches(name, list(known), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    param = f"{path}.{name}" if path else name
    return InvalidRequest(f"unknown field {param!r}{hint}", param=param)
