"""The child of `vllm_peer`: runs in the peer's environment; for each line read, runs all work once and prints rates."""

import json
import random
import statistics
import sys
import time

from vllm import LLM, SamplingParams, TokensPrompt  # type: ignore[import-not-found,unused-ignore]

CONTEXT, DECODED = 192, 16


def main() -> None:
    llm = LLM(
        model=sys.argv[1], dtype="bfloat16", max_model_len=1024, enable_prefix_caching=False, max_num_seqs=32,
        max_num_batched_tokens=8192,
    )  # fmt: skip
    engine = llm.llm_engine
    numbers = random.Random(1)
    print("answer ready", flush=True)
    for _ in sys.stdin:
        rates = {f"decode {batch}": batch / decode(engine, numbers, batch) for batch in (1, 8, 32)}
        rates |= {f"prefill {batch} x 512": 512 * batch / prefill(engine, numbers, batch) for batch in (1, 8)}
        print("answer " + json.dumps(rates), flush=True)


def add(engine: object, numbers: random.Random, batch: int, size: int, max_tokens: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    for _ in range(batch):
        prompt = TokensPrompt(prompt_token_ids=numbers.choices(range(100, 40_000), k=size))
        engine.add_request(str(numbers.random()), prompt, params)  # type: ignore[attr-defined]


def decode(engine: object, numbers: random.Random, batch: int) -> float:
    """Median seconds of a step once all sequences decode."""
    add(engine, numbers, batch, CONTEXT - DECODED // 2, DECODED)
    times = steps(engine)
    return statistics.median(times[-DECODED + 2 :])


def prefill(engine: object, numbers: random.Random, batch: int) -> float:
    """Seconds until all prompts have their first token."""
    add(engine, numbers, batch, 512, 1)
    return sum(steps(engine))


def steps(engine: object) -> list[float]:
    times = []
    while engine.has_unfinished_requests():  # type: ignore[attr-defined]
        started_s = time.perf_counter()
        engine.step()  # type: ignore[attr-defined]
        times.append(time.perf_counter() - started_s)
    return times


if __name__ == "__main__":
    main()
