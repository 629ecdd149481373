"""One source of time: what waits, measures or gives up goes by the monotonic clock, in the syntax trees of the product.

The wall clock may jump, by a second or by an hour: it is for people and for other systems alone.
"""

import ast
from collections.abc import Iterator

import pytest

from tests.conformance.test_no_pickle import PACKAGES
from tests.paths import ROOT

WALL = frozenset({"time.time", "time.time_ns", "time.localtime", "time.gmtime", "time.strftime", "time.ctime"})
WALL_METHODS = frozenset({"now", "utcnow", "today"})  # of datetime and date
# Who may read the wall clock, and for whom.
ALLOWED = {
    "deploy/cli/certs.py": "when a certificate begins and ends",
    "deploy/load/bench.py": "the date of a report",
    "router/app.py": "`created` of the model's card",
    "router/front/http/generation.py": "`created` of an answer",
    "router/front/http/responses.py": "`created_at` and `completed_at` of a response",
    "router/request/adapters.py": "`created` of an adapter's card",
    "router/observe/otlp.py": "the end of a span, as collectors want it",
    "router/text/chat_template.py": "the date in a prompt",
}


def wall_reads(source: str) -> Iterator[str]:
    """Each mention of a wall clock, called or passed on, with its line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            base = name.rpartition(".")[0].rpartition(".")[2]
            if name in WALL or (node.attr in WALL_METHODS and base in ("datetime", "date")):
                yield f"{name} in line {node.lineno}"
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            yield from (f"from time import {a.name} in line {node.lineno}" for a in node.names)


def clock_defaults(source: str) -> Iterator[str]:
    """The default of each parameter that is a clock."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        arguments = node.args.posonlyargs + node.args.args
        defaults = [*zip(reversed(arguments), reversed(node.args.defaults), strict=False)]
        for argument, default in [*defaults, *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)]:
            if argument.arg.endswith("clock") and default is not None:
                yield ast.unparse(default)


def sources(package: str) -> dict[str, str]:
    paths = [path for path in (ROOT / package).rglob("*.py") if path.parent.name != "pb"]
    assert paths
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths}


@pytest.mark.parametrize("package", PACKAGES)
def test_the_wall_clock_is_read_for_people_alone(package: str) -> None:
    found = {name: list(wall_reads(source)) for name, source in sources(package).items()}
    assert {name: reads for name, reads in found.items() if reads and name not in ALLOWED} == {}
    assert [name for name in ALLOWED if name.startswith(f"{package}/") and not found.get(name)] == []


def test_every_default_clock_is_the_monotonic_one() -> None:
    found = {
        (name, default)
        for package in PACKAGES
        for name, source in sources(package).items()
        for default in clock_defaults(source)
    }
    assert {default for _, default in found} == {"time.monotonic"}
    assert {"common/cores/core_loop.py", "common/worker/watchdog.py", "common/cluster/prefix_index/mirror.py"} <= {
        name for name, _ in found
    }


@pytest.mark.parametrize(
    "source",
    [
        "import time\nt = time.time()",
        "import time\nclock = time.time",
        "from time import time",
        "import datetime\nt = datetime.datetime.now()",
        "from datetime import datetime\nt = datetime.utcnow()",
        "from datetime import date\nt = date.today()",
    ],
)
def test_a_wall_clock_is_found_however_it_is_named(source: str) -> None:
    assert list(wall_reads(source))


@pytest.mark.parametrize(
    "source", ["import time\nt = time.monotonic()", "t = self.now()", "import time\ntime.sleep(1)"]
)
def test_other_clocks_are_not(source: str) -> None:
    assert not list(wall_reads(source))


@pytest.mark.parametrize("source", ["def f(clock=time.time): ...", "async def f(*, clock=time.time): ..."])
def test_a_default_clock_is_found_wherever_it_stands(source: str) -> None:
    assert list(clock_defaults(source)) == ["time.time"]
