"""The child of `hf_peer`: runs in the peer's environment, reads one piece of work a line, answers its seconds."""

import json
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, StaticCache  # type: ignore[import-not-found,unused-ignore]

CONTEXT = 192


def main() -> None:
    path, dtype, num_threads = Path(sys.argv[1]), getattr(torch, sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(num_threads)
    clock = time.process_time if num_threads == 1 else time.perf_counter
    model = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=dtype)
    print("ready", flush=True)
    caches: dict[int, object] = {}
    for line in sys.stdin:
        kind, batch, new = json.loads(line)
        token_ids = torch.full((batch, new), 17)
        with torch.inference_mode():
            if kind == "decode":
                if batch not in caches:
                    caches.clear()
                    caches[batch] = StaticCache(config=model.config, max_cache_len=CONTEXT + 1)
                position = torch.tensor([CONTEXT])
                extra = {"past_key_values": caches[batch], "cache_position": position}
            else:
                extra = {"use_cache": True}
            started_s = clock()
            model(token_ids, logits_to_keep=1, **extra).logits[:, -1].float().argmax(-1)
            print(clock() - started_s, flush=True)


if __name__ == "__main__":
    main()
