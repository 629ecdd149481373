"""`python -m tests.bench.fairness`: two tenants of a live cluster of 1+1, one of which floods it; prints the figures.

The demo model unless `--model DIR` names another. Exit code 1 when the other tenant's first token takes more than
5 times as long as without the flood, or the flood keeps less than 60 % of its throughput.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from common.checkpoint.demo_model import fetch_demo_model
from tests.cluster.cluster import running_cluster
from tests.cluster.two_tenants import Load, measure, two_tenants

MAX_TIMES_SLOWER, MIN_THROUGHPUT = 5.0, 0.6


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.fairness", description=__doc__)
    parser.add_argument("--model", type=Path, help="a directory or GGUF file instead of the demo model")
    parser.add_argument("--flood", type=int, default=Load.num_flood, help="requests of the flood, all at once")
    options = parser.parse_args(arguments)
    model = options.model or fetch_demo_model(lambda text: print(text, file=sys.stderr))
    with (
        tempfile.TemporaryDirectory() as folder,
        two_tenants(Path(folder)) as router,
        running_cluster(model, config={"router": router}) as cluster,
    ):
        figures = asyncio.run(measure(cluster.url, Load(num_flood=options.flood)))
    print(figures)
    return 0 if figures.times_slower <= MAX_TIMES_SLOWER and figures.throughput_kept >= MIN_THROUGHPUT else 1


if __name__ == "__main__":
    raise SystemExit(main())
