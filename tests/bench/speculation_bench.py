"""Tokens per second with speculation beside none, by turns: repetitive text and text that is not, several batches.

The real core and runner on the demo model, without threads and network; one thread, by processor time. Each run starts
from a new core that has measured and learnt nothing.

python -m tests.bench.speculation_bench
"""

import statistics
import time
from typing import Any

import torch

from common.checkpoint import Checkpoint, open_checkpoint
from common.checkpoint.demo_model import fetch_demo_model
from common.engine.contract.executor import Runner, StepFinished
from common.engine.devices.cpu.device import cpu_dtype
from common.engine.kv.block_pool import BlockPool
from common.engine.scheduling.block_tables import PoolGroup
from common.values.messages import TokenBatch
from common.values.request import SamplingParams
from common.worker.events import RunStep, SendToRouter
from tests.bench.engine_bench import BLOCK_SIZE, NUM_BLOCKS, load_runner
from tests.decode_worker.harness import Bench, job

NUM_TOKENS = 96
NUM_TURNS = 3
BATCHES = (1, 8, 16, 32)
MAX_DRAFT_TOKENS = 15
_TEXT = (
    "The {name} river risess in the northern hills and flows south through three towns before it reaches the sea. In "
    "spring the snow of the hills melts, and the {name} river often floods the fields between the second and the third "
    "town. The towns have built a dam above the first town, which holds back the water for the dry months of summer."
)
_NAMES = ("mean", "alder", "score", "tamar", "price", "ouse", "depth", "severn")
KINDS = {
    "correction, greedy": ("Correct the spelling of this text and write it out again:\n" + _TEXT, 0.0),
    "summary, greedy": ("Summarize this text:\n" + _TEXT, 0.0),
    "story, temperature 1": ("Write a long story about a {name} and a stranger in a town by the sea.", 1.0),
}


def run() -> list[dict[str, Any]]:
    checkpoint = open_checkpoint(fetch_demo_model(print))
    runner = load_runner(checkpoint, cpu_dtype("auto"))
    torch.set_num_threads(1)
    rows = []
    for batch in BATCHES:
        for kind in KINDS:
            rows += _measure(runner, checkpoint, kind, batch)
    return rows


def _measure(runner: Runner, checkpoint: Checkpoint, kind: str, batch: int) -> list[dict[str, Any]]:
    found: dict[int, list[tuple[float, float]]] = {MAX_DRAFT_TOKENS: [], 0: []}
    for _ in range(NUM_TURNS):
        outputs = []
        for max_draft_tokens, results in found.items():
            bench = _started(runner, checkpoint, kind, batch, max_draft_tokens)
            results.append(_run(runner, bench))
            outputs.append([bench.output(f"r{number}") for number in range(batch)])
        assert outputs[0] == outputs[1], "speculation changed an output"
    speeds = [statistics.median(speed for speed, _ in results) for results in found.values()]
    per_step = [statistics.median(num_tokens for _, num_tokens in results) for results in found.values()]
    name = f"speculation, {kind}, batch {batch}"
    return [_row(name, "tok/s", *speeds), _row(f"{name}, tokens per step", "tokens", *per_step)]


def _started(runner: Runner, checkpoint: Checkpoint, kind: str, batch: int, max_draft_tokens: int) -> Bench:
    """A core whose sequences have their first tokens."""
    tokenizer, (text, temperature) = checkpoint.tokenizer(), KINDS[kind]
    groups, sizes = [PoolGroup(BlockPool(NUM_BLOCKS, BLOCK_SIZE))], {"max_num_seqs": batch, "max_num_waiting": batch}
    bench = Bench(budget=512, groups=groups, max_draft_tokens=max_draft_tokens, **sizes)
    stops = tuple(checkpoint.eos_token_ids)
    for number in range(batch):
        message = text.format(name=_NAMES[number % len(_NAMES)] + str(number // len(_NAMES) or ""))
        chat = f"<|im_start|>user\n{message}<|im_end|>\n<|im_start|>assistant\n"
        params = SamplingParams(seed=number, max_tokens=NUM_TOKENS, temperature=temperature, stop_token_ids=stops)
        bench.reserve(job(f"r{number}", tuple(tokenizer.encode(chat).ids), sampling=params), local=4096)
    while any(len(bench.output(f"r{number}")) == 0 for number in range(batch)):
        _step(runner, bench)
    return bench


def _run(runner: Runner, bench: Bench) -> tuple[float, float]:
    """(tokens per second, tokens per step) to the end."""
    before, num_steps = _num_tokens(bench), 0
    started_s = time.process_time()
    while bench.plan is not None:
        _step(runner, bench)
        num_steps += 1
    num_tokens = _num_tokens(bench) - before
    return num_tokens / (time.process_time() - started_s), num_tokens / num_steps


def _step(runner: Runner, bench: Bench) -> None:
    """Without the checks of `Bench.handle`."""
    plan, bench.plan = bench.plan, None
    assert plan is not None
    effects = bench.core.handle(StepFinished(runner.run(plan)), bench.now_s)
    bench.sent += [effect.message for effect in effects if isinstance(effect, SendToRouter)]
    bench.plan = next((effect.plan for effect in effects if isinstance(effect, RunStep)), None)


def _num_tokens(bench: Bench) -> int:
    batches = (message for message in bench.sent if isinstance(message, TokenBatch))
    return sum(len(attempt.tokens) for batch in batches for attempt in batch.attempts)


def _row(metric: str, unit: str, ours: float, plain: float) -> dict[str, Any]:
    return {"metric": metric, "unit": unit, "ours": ours, "peers": {"off": plain}, "floor": None, "better": "higher"}


if __name__ == "__main__":
    for row in run():
        ours, plain = row["ours"], row["peers"]["off"]
        print(f"{row['metric']:<60} {ours:8.1f} {row['unit']:<6}  off {plain:8.1f}  {ours / plain:.2f} x", flush=True)
