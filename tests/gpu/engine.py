"""What stands between kernels and the service on a GPU: draws, copies beside compute, graphs, tuning."""

import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from common.engine.devices.triton.device_draws import TritonDraws
from common.engine.devices.triton.tuning import TuningFile, tune_attention
from common.engine.kv.cache import KVCache
from common.engine.loading import load_model
from common.engine.sampling import sample
from common.values.config import ModelConfig, WorkerConfig
from common.values.request import SamplingParams
from kvtransfer.chunk.pack import kv_packer
from kvtransfer.chunk.plan import FRAME_BYTES
from kvtransfer.events import Chunk
from tests.caches import attention_spec, fill
from tests.common.engine.devices.triton.test_device_draws import logits_of, specs_of_all_kinds
from tests.common.engine.drive import Generation, blocks_for, run_all
from tests.gpu.report import Report, error_of
from tests.tiny_model import write_tiny_model

SPIN_CYCLES = 40_000_000  # about 20 ms
PROMPTS = [[5, 77, 130, 9], [200], list(range(10, 47)), [41] * 16, list(range(100, 117))]


def check_engine(report: Report) -> None:
    for check in (draw_the_same_tokens, copy_after_compute, replay_a_generation, tune_once):
        report.check(check.__name__, error_of(check))


def draw_the_same_tokens(device: str = "cuda", vocab_size: int = 49_152) -> None:
    """Logits on the device give the tokens that the same logits give on the CPU, for every kind of parameters."""
    specs = specs_of_all_kinds()
    logits = logits_of(len(specs), vocab_size)
    assert sample(logits.to(device), specs, TritonDraws()) == sample(logits, specs)


def copy_after_compute() -> None:
    """A chunk packed as soon as its layer is launched holds what the layer's kernels write, 20 ms later (C-03)."""
    cache = KVCache(attention_spec(4, 2, 64, torch.float32), (8,), "cuda")
    fill(cache, 0.0)
    assert cache.fence is not None
    packer = kv_packer(cache)
    packed: list[torch.Tensor] = []

    def pack(layer_idx: int) -> None:
        num_bytes = 2 * 100 * 2 * 64 * 4
        out = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        chunk = Chunk(layer_idx, layer_idx, layer_idx + 1, 0, 100, num_bytes + FRAME_BYTES, shard_end=2)
        packer.gather(chunk, (6, 1, 4, 0, 2, 7, 3), out)
        packed.append(out.view(torch.float32))

    threads = []
    for layer_idx in range(4):
        torch.cuda._sleep(SPIN_CYCLES)
        for plane in cache.layers[layer_idx]:
            plane.fill_(layer_idx + 1.0)
        cache.fence.mark(layer_idx + 1)
        threads.append(threading.Thread(target=pack, args=(layer_idx,)))
        threads[-1].start()
    for thread in threads:
        thread.join(60)
    assert sorted({float(value) for out in packed for value in out.unique()}) == [1.0, 2.0, 3.0, 4.0]


def replay_a_generation(attention: str = "triton", kinds: tuple[str, ...] = ("auto", "int8", "fp8_e4m3")) -> None:
    """Steps replayed from CUDA graphs give the tokens of launched ones, for every kind of cache."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_tiny_model(Path(folder) / "tiny")
        for kv_cache_dtype in kinds:
            outputs = [generate(path, kv_cache_dtype, has_graphs=has, attention=attention) for has in (False, True)]
            assert outputs[0] == outputs[1], kv_cache_dtype


def generate(path: Path, kv_cache_dtype: str, *, has_graphs: bool, attention: str = "triton") -> list[list[int]]:
    """Tokens of a few prompts that leave the batch one after another."""
    options = {"dtype": "float32", "attention": attention, "num_blocks": 64, "kv_cache_dtype": kv_cache_dtype}
    model = ModelConfig(path=str(path))
    loaded = load_model(WorkerConfig(role="decode", worker_id="d", model=model, cuda_graphs=has_graphs, **options))
    tables = blocks_for([len(prompt) + 12 for prompt in PROMPTS], 16, 64)
    params = [SamplingParams(seed=1, max_tokens=4 + 2 * idx, temperature=0.8) for idx in range(len(PROMPTS))]
    batch = [Generation(*parts) for parts in zip(PROMPTS, params, tables, strict=True)]
    run_all(loaded.runner, batch, 64)
    return [generation.output for generation in batch]


def tune_once() -> None:
    """Tuning measures, keeps what it chose, and does not measure again."""
    kv = tuple(torch.zeros(2, 256, 16, 8, 128, dtype=torch.bfloat16, device="cuda"))
    with tempfile.TemporaryDirectory() as folder:
        file = TuningFile(Path(folder) / "tuned.json")
        tiles = tune_attention(file, kv, 32, 128, torch.bfloat16)

        def measure_again(run: Callable[[], object]) -> float:
            raise AssertionError("measured twice")

        assert tune_attention(file, kv, 32, 128, torch.bfloat16, measure_again) == tiles
