"""torch.compile of the plain loop beside our engine, bfloat16, one thread: how fast, and how long until the first step.

    python -m tests.bench.compiled WORK...        (works: decode-1 decode-8 decode-32 prefill-512; default: all)

A process per work and state of inductor's cache, first empty, then full: that is what a worker's start would cost.
Steps are timed by processor time, by turns with ours. Minutes: not a part of `make bench`.
"""

import json
import os
import subprocess
import sys
import tempfile
import time

import torch

from common.checkpoint import open_checkpoint
from common.checkpoint.demo_model import fetch_demo_model
from tests.bench.engine_bench import CONTEXT, Work, by_turns, discard, load_runner, step_plan
from tests.bench.plain_loop import PlainLoop

WORKS = {
    **{f"decode-{batch}": Work("decode", batch, 1) for batch in (1, 8, 32)},
    "prefill-512": Work("prefill", 1, 512),
}
NUM_ROUNDS = 9


def main() -> None:
    """Each work twice, in processes that share a cache."""
    for name in sys.argv[1:] or WORKS:
        with tempfile.TemporaryDirectory() as cache:
            for state in ("empty", "full"):
                env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
                command = [sys.executable, "-m", __spec__.name, "--child", name]
                reply = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
                found = json.loads(reply.stdout.splitlines()[-1])
                rates = ", ".join(f"{side} {rate:.0f} tok/s" for side, rate in found["rates"].items())
                print(f"{name}, cache {state}: first step after {found['first_s']:.1f} s, then {rates}", flush=True)


def child(work: Work) -> None:
    """Prints the seconds to the first compiled step, and the rates of the steps that follow."""
    torch.set_num_threads(1)
    checkpoint = open_checkpoint(fetch_demo_model(print))
    runner, loop = load_runner(checkpoint, torch.bfloat16), PlainLoop(checkpoint, torch.bfloat16)
    kv = loop.new_cache(work.batch, CONTEXT + 1) if work.kind == "decode" else None
    plan, plain = step_plan(work), PlainLoop(checkpoint, torch.bfloat16)
    loop.compile()

    def call(one: PlainLoop) -> None:
        one.decode(kv) if kv is not None else one.prefill(work.batch, work.new)

    started_s = time.perf_counter()
    call(loop)
    first_s = time.perf_counter() - started_s
    sides = {
        "ours": lambda: discard(runner.run(plan)),
        "compiled": lambda: call(loop),
        "the same loop, not compiled": lambda: call(plain),
    }
    seconds = by_turns(sides, 1, NUM_ROUNDS)
    num_tokens = work.batch * work.new
    print(json.dumps({"first_s": first_s, "rates": {side: num_tokens / value for side, value in seconds.items()}}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(WORKS[sys.argv[2]])
    else:
        main()
