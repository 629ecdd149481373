"""Functions of the compiled library with their argument types."""

import ctypes
from typing import Any


def function(library: ctypes.CDLL, name: str, signature: str) -> "ctypes._NamedFuncPointer":
    """p = pointer, i = int64, f = float, b = int. Returns nothing."""
    types: dict[str, Any] = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float, "b": ctypes.c_int}
    found = library[name]
    found.argtypes, found.restype = [types[kind] for kind in signature], None
    return found
