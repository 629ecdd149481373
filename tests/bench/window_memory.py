"""KV blocks in use while one sequence grows: flat in groups of layers with a window, by length in the others.

python -m tests.bench.window_memory ~/.cache/pdserve/gemma-3-270m-q4_k_m.gguf --tokens 8192
"""

import argparse
from pathlib import Path

from tests.common.engine.served import Served

NUM_OUTPUT_TOKENS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=8192, help="of the longest prompt")
    arguments = parser.parse_args()
    served = Served(arguments.model.expanduser(), max_num_seqs=1, attention="cpu")
    spec = served.loaded.cache.spec
    for group in spec.groups:
        print(f"{group}: {group.bytes_per_token} bytes per token")
    print(f"one group for all layers would take {spec.bytes_per_token} bytes per token")
    num_tokens = arguments.tokens
    lengths = sorted({max(1, num_tokens >> shift) for shift in range(0, 5, 2)})
    for length in lengths:
        served.most_used = [0] * len(spec.groups)
        served.ask(str(length), [2 + idx * 31 % 1000 for idx in range(length)], NUM_OUTPUT_TOKENS)
        served.run_all()
        assert len(served.output(str(length))) == NUM_OUTPUT_TOKENS
        sizes = [
            count * spec.block_size * group.bytes_per_token
            for count, group in zip(served.most_used, spec.groups, strict=True)
        ]
        parts = ", ".join(f"{size / 1e6:.1f} MB" for size in sizes)
        alike = (length + NUM_OUTPUT_TOKENS) * spec.bytes_per_token
        print(f"{length} tokens: {parts}; {sum(sizes) / 1e6:.1f} MB in all, {alike / 1e6:.1f} MB without windows")


if __name__ == "__main__":
    main()
