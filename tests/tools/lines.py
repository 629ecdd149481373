"""Lines of Python per package, and the house limits: growth is argued for in the commit that brings it."""

import ast
import statistics
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.paths import ROOT

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 70


def python_files() -> list[Path]:
    """Tracked Python files, generated ones left out."""
    names = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in names.split() if not name.startswith("common/wire/pb/") and (ROOT / name).exists()]


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """(name, lines) of every function in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
            yield node.name, node.end_lineno - node.lineno + 1


def main() -> int:
    lines: Counter[str] = Counter()
    lengths: list[int] = []
    faults: list[str] = []
    for path in python_files():
        relative = path.relative_to(ROOT)
        count = path.read_text().count("\n")
        lines[relative.parts[0]] += count
        if count > MAX_FILE_LINES:
            faults.append(f"{relative}: {count} lines")
        for name, length in functions(path):
            if relative.parts[0] != "tests":
                lengths.append(length)
            if length > MAX_FUNCTION_LINES:
                faults.append(f"{relative}:{name}: {length} lines")
    source = sum(count for name, count in lines.items() if name != "tests")
    for name, count in sorted(lines.items()):
        print(f"{name:16} {count:6}")
    print(f"source {source}, tests {lines['tests']}, median function {statistics.median(lengths):.0f} lines")
    print("\n".join(faults))
    return 1 if faults or lines["tests"] * 2 < source else 0


if __name__ == "__main__":
    raise SystemExit(main())
