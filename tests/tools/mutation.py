"""`make mutation`: plants small faults, sampled from all that cosmic-ray can make in the cores, one at a time.

    python -m tests.tools.mutation [AREA ...] [--sample 20] [--seed 1] [--keep]

Each fault is planted alone, in a copy of the checkout; the area's own tests then run until one fails. A fault that
makes tests hang counts as seen. Prints a line per fault and the score per area; writes build/mutation.json. `--keep`
puts the areas' scores into docs/robustness.md, and leaves those of areas that were not run as they were.
"""

import argparse
import datetime
import difflib
import json
import random
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.paths import ROOT

COSMIC_RAY = "cosmic-ray==8.7.0"
ENVIRONMENT = ROOT / "build" / "cosmic-ray"
OUTPUT = ROOT / "build" / "mutation.json"
KEPT = Path(__file__).with_name("data") / "mutation.json"
LIMIT_S = 600.0


@dataclass(frozen=True, slots=True)
class Area:
    """Sources that faults are planted in, and the tests that must see them, the quickest first."""

    sources: tuple[str, ...]
    tests: tuple[str, ...]


AREAS = {
    "router/core": Area(("router/core/*.py",), ("tests/router/core", "tests/router/test_service.py")),
    "prefill_worker": Area(("prefill_worker/*.py",), ("tests/prefill_worker",)),
    "decode_worker": Area(("decode_worker/*.py",), ("tests/decode_worker",)),
    "scheduling": Area(
        ("common/engine/scheduling/*.py",),
        ("tests/common/engine/scheduling", "tests/prefill_worker", "tests/decode_worker"),
    ),
    "kvtransfer": Area(
        ("kvtransfer/sender/core.py", "kvtransfer/sender/state.py", "kvtransfer/receiver/core.py",
         "kvtransfer/receiver/state.py", "kvtransfer/receiver/window.py", "kvtransfer/receiver/coverage.py",
         "kvtransfer/chunk/*.py"),
        ("tests/kvtransfer/chunk", "tests/kvtransfer/test_sender.py", "tests/kvtransfer/test_receiver.py",
         "tests/kvtransfer/test_core_pair.py", "tests/kvtransfer/test_wire.py", "tests/kvtransfer"),
    ),
    "block pool": Area(("common/engine/kv/block_pool.py",), ("tests/common/engine/kv",)),
    "sampler": Area(("common/engine/sampling/*.py",), ("tests/common/engine/sampling",)),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fault:
    path: str
    operator: str
    occurrence: int
    line: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """`change` is the planted difference; `is_seen` says whether a test failed."""

    area: str
    fault: Fault
    change: str
    is_seen: bool


def cosmic_ray(*arguments: str, cwd: Path) -> str:
    """What `list_mutations` prints, in an environment of cosmic-ray's own."""
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        venv.create(ENVIRONMENT, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", COSMIC_RAY], check=True)
    script = str(ROOT / "tests" / "tools" / "list_mutations.py")
    return subprocess.run([python, script, *arguments], cwd=cwd, capture_output=True, text=True, check=True).stdout


def sampled(area: Area, tree: Path, number: int, rng: random.Random) -> list[Fault]:
    """`number` of the faults that can be planted in the area."""
    paths = sorted({str(path.relative_to(tree)) for pattern in area.sources for path in tree.glob(pattern)})
    faults = [Fault(**json.loads(line)) for line in cosmic_ray("list", *paths, cwd=tree).splitlines()]
    return rng.sample(faults, min(number, len(faults)))


def verdicts(tree: Path, names: Sequence[str], number: int, seed: int) -> Iterator[Verdict]:
    rng = random.Random(seed)
    for name in names:
        area = AREAS[name]
        tests = [path for path in area.tests if (tree / path).exists()]
        assert _passes(tree, tests), f"{name}: its tests fail without any fault"
        for fault in sampled(area, tree, number, rng):
            path = tree / fault.path
            original = path.read_text()
            changed = cosmic_ray("make", fault.path, fault.operator, str(fault.occurrence), cwd=tree)
            path.write_text(changed)
            try:
                yield Verdict(name, fault, _difference(original, changed), not _passes(tree, tests))
            finally:
                path.write_text(original)


def _passes(tree: Path, tests: Sequence[str]) -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not cluster", *tests]
    try:
        done = subprocess.run(command, cwd=tree, capture_output=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def _difference(before: str, after: str) -> str:
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0)
    return " ".join(line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---"))


def scores(found: Sequence[Verdict]) -> dict[str, dict[str, object]]:
    """Per area, with the faults that no test saw."""
    of_areas = {name: [verdict for verdict in found if verdict.area == name] for name in AREAS}
    return {
        name: {
            "planted": len(verdicts),
            "seen": sum(verdict.is_seen for verdict in verdicts),
            "date": str(datetime.date.today()),
            "unseen": [f"{each.fault.path}: {each.change}" for each in verdicts if not each.is_seen],
        }
        for name, verdicts in of_areas.items()
        if verdicts
    }


def keep(found: Sequence[Verdict]) -> None:
    from tests.tools import robustness_doc

    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    KEPT.parent.mkdir(exist_ok=True)
    KEPT.write_text(json.dumps({**kept, **scores(found)}, indent=1) + "\n")
    robustness_doc.main(["--write"])


def copy_of_checkout(folder: Path) -> Path:
    """The tracked files as they are now."""
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in names.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("areas", nargs="*", default=list(AREAS), help=f"of {', '.join(AREAS)}; default: all")
    parser.add_argument("--sample", type=int, default=20, help="faults per area")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="put the scores into docs/robustness.md")
    options = parser.parse_args()
    found: list[Verdict] = []
    with tempfile.TemporaryDirectory() as folder:
        for verdict in verdicts(copy_of_checkout(Path(folder)), options.areas, options.sample, options.seed):
            found.append(verdict)
            state = "seen    " if verdict.is_seen else "NOT SEEN"
            print(f"{state} {verdict.fault.path}:{verdict.fault.line}  {verdict.change}", flush=True)
    for name, score in scores(found).items():
        print(f"{name:16} {score['seen']} of {score['planted']} seen")
    OUTPUT.parent.mkdir(exist_ok=True)
    OUTPUT.write_text(json.dumps([asdict(verdict) for verdict in found], indent=1))
    if options.keep:
        keep(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
