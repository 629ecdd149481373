"""Finds the tests that a text names as `tests/...py::test_name`, and which of them do not exist."""

import ast
import re
from pathlib import Path

from tests.paths import ROOT

_NAME = re.compile(r"tests/[\w/]+\.py(?:::\w+)?")


def names_of_tests(text: str) -> list[str]:
    return _NAME.findall(text)


def missing(names: list[str]) -> list[str]:
    """Names of files or functions that are not there."""
    return [name for name in sorted(set(names)) if not _exists(name)]


def _exists(name: str) -> bool:
    path, _, function = name.partition("::")
    file = ROOT / path
    return file.is_file() and (not function or function in _functions(file))


def _functions(file: Path) -> set[str]:
    tree = ast.parse(file.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
