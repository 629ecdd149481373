"""Lists or makes the small faults that cosmic-ray knows, for `tests.tools.mutation`. Runs in cosmic-ray's environment.

list_mutations.py list FILE...                 -> a JSON line {path, operator, occurrence, line} per possible fault
list_mutations.py make FILE OPERATOR NUMBER    -> the file's text with that fault in it
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cosmic_ray.ast import ast_nodes, get_ast_from_path
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

# `X | Y` is mostly a type here: to change it ends the import, which every test sees. Decorators likewise.
LEFT_OUT = ("BitOr", "BitAnd", "BitXor", "Shift", "MatMul", "RemoveDecorator", "VariableReplacer", "VariableInserter")


def operators() -> Iterator[tuple[str, Any]]:
    for name in operator_names():
        operator = get_operator(name)
        if not operator.arguments() and not any(part in name for part in LEFT_OUT):
            yield name, operator()


def possible(path: str) -> Iterator[dict[str, object]]:
    tree = get_ast_from_path(Path(path))
    for name, operator in operators():
        positions = (start for node in ast_nodes(tree) for start, _ in operator.mutation_positions(node))
        for occurrence, start in enumerate(positions):
            yield {"path": path, "operator": name, "occurrence": occurrence, "line": start[0]}


def main() -> None:
    if sys.argv[1] == "list":
        for path in sys.argv[2:]:
            for fault in possible(path):
                print(json.dumps(fault))
        return
    path, name, occurrence = sys.argv[2:]
    sys.stdout.write(mutate_code(Path(path).read_text(), get_operator(name)(), int(occurrence)) or "")


if __name__ == "__main__":
    main()
