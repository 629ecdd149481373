"""How the packages are divided: modules, rooms (what lies directly in a folder), arrows between rooms, circles, floors.

`python -m tests.tools.house [ROOT]` prints the table for this tree or for another checkout of it.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp

from tests.paths import ROOT

PACKAGES = ("common", "kvtransfer", "prefill_worker", "decode_worker", "router", "deploy")
INNER = ("common.engine", "common.cluster", "router.front")

Arrow = tuple[str, str]


@dataclass(frozen=True, slots=True)
class House:
    """One folder: its modules at any depth, its rooms, and who imports whom among the rooms."""

    num_modules: int
    rooms: frozenset[str]
    arrows: frozenset[Arrow]

    @property
    def num_floors(self) -> int | None:
        """Rooms on the longest chain of imports; None when there is a circle."""
        below: dict[str, set[str]] = {room: set() for room in self.rooms}
        for importer, imported in self.arrows:
            below[importer].add(imported)
        floors: dict[str, int] = {}
        try:
            for room in TopologicalSorter(below).static_order():
                floors[room] = 1 + max((floors[other] for other in below[room]), default=0)
        except CycleError:
            return None
        return max(floors.values(), default=0)


def house(graph: grimp.ImportGraph, folder: str) -> House:
    """The rooms of `folder`, a dotted name, and the imports between them."""
    depth = folder.count(".") + 2
    modules = [module for module in graph.modules if module.startswith(f"{folder}.")]
    pairs = {(_room(module, depth), _room(other, depth)) for module, other in _imports(graph, modules, folder)}
    rooms = frozenset(_room(module, depth) for module in modules)
    return House(len(modules), rooms, frozenset(pair for pair in pairs if pair[0] != pair[1]))


def _imports(graph: grimp.ImportGraph, modules: Iterable[str], folder: str) -> Iterable[Arrow]:
    for module in modules:
        for imported in graph.find_modules_directly_imported_by(module):
            if imported.startswith(f"{folder}."):
                yield module, imported


def _room(module: str, depth: int) -> str:
    return ".".join(module.split(".")[:depth])


def build(root: Path) -> grimp.ImportGraph:
    """The imports of the checkout at `root`."""
    sys.path.insert(0, str(root))
    return grimp.build_graph(*PACKAGES, cache_dir=None)


def main() -> int:
    root = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT
    graph = build(root)
    print(f"{'folder':16} modules  rooms  arrows  floors")
    for folder in (*PACKAGES, *(name for name in INNER if name in graph.modules)):
        one = house(graph, folder)
        floors = "circle" if one.num_floors is None else str(one.num_floors)
        print(f"{folder:16} {one.num_modules:7} {len(one.rooms):6} {len(one.arrows):7}  {floors:>6}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
