"""`make bench`: every part beside its peers in one run. Prints tables, writes build/bench.json and build/bench.svg.

python -m tests.bench.run [--peers] [--parts engine,steps,speculation,...]: those of `PARTS`, and peers
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.bench.failures import NOTES, sparing
from tests.bench.others import DISTURBED, Others

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch: waiting threads must not take the other's core

PARTS = ("engine", "steps", "ranks", "speculation", "experts", "handoff", "index", "router", "service", "role_change")
PEERS = ("hf_peer", "llama_peer", "vllm_peer", "router_peers_bench")
BUILD = Path("build")
Rows = list[dict[str, Any]]


def main() -> None:
    arguments = _arguments()
    for peer in PEERS if arguments.peers else ():
        with sparing(f"{peer}, installation"):
            import_module(f"tests.bench.{peer}").install()
    BUILD.mkdir(exist_ok=True)
    print(f"{time.strftime('%Y-%m-%d')}, {_processor()}, {os.cpu_count()} cores, load {_load()}")
    rows: Rows = []
    parts = arguments.parts or ",".join((*PARTS, "peers", "router_peers") if arguments.peers else PARTS)
    for part in parts.split(","):
        if _module(part) is None:
            continue
        started_s = time.monotonic()
        part_rows: Rows = []
        with sparing(part), Others() as others:
            part_rows = _runner(part, with_peers=arguments.peers)()
        rows += [row | {"others": round(others.cores, 2)} for row in part_rows]
        head = f"{part} ({time.monotonic() - started_s:.0f} s, others took {others.cores:.2f} cores)"
        print(f"\n{head}\n{table(rows[-len(part_rows) :] if part_rows else [])}", flush=True)
        (BUILD / "bench.json").write_text(json.dumps(rows, indent=1) + "\n")
    print("\n" + "\n".join(NOTES) if NOTES else "\neverything that was asked for was measured")
    import_module("tests.bench.plot").write_plot(rows, BUILD / "bench.svg")


def table(rows: Rows) -> str:
    """Aligned text: metric, ours, each peer with the ratio in our favour, share of the floor."""
    return "\n".join(_line(row) for row in rows)


def _line(row: dict[str, Any]) -> str:
    parts = [f"{row['metric']:<58} {row['ours']:>10.4g} {row['unit']:<18}"]
    parts += [f"{peer} {value:.4g} ({ratio(row, value):.2f} x)" for peer, value in row["peers"].items()]
    if row.get("others", 0.0) > DISTURBED:
        parts.append("disturbed")
    if row["floor"]:
        parts.append(f"{100 * ratio(row, row['floor']):.0f} % of the floor")
    return "  ".join(parts)


def ratio(row: dict[str, Any], other: float) -> float:
    """Above 1 when ours is better."""
    return float(row["ours"] / other if row["better"] == "higher" else other / row["ours"])


def _module(part: str) -> str | None:
    """Where a part is measured."""
    names = (f"tests.bench.{part}_bench", f"tests.bench.{part}")
    return next((name for name in names if find_spec(name) is not None), None)


def _runner(part: str, *, with_peers: bool) -> Callable[[], Rows]:
    run: Callable[..., Rows] = import_module(_module(part) or "").run
    flags = {"engine": {"with_hf": with_peers}, "service": {"with_peers": with_peers}}
    return partial(run, **flags.get(part, {}))


def _load() -> str:
    return f"{os.getloadavg()[0]:.1f}"


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", action="store_true", help="install peers and measure them too")
    parser.add_argument("--parts", default="", help="default: all")
    return parser.parse_args()


if __name__ == "__main__":
    main()
