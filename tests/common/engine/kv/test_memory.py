"""The KV cache takes what a device has left beside weights and the largest step; weights that do not fit say how."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path

import pytest
import torch

from common.checkpoint import CheckpointError, open_checkpoint
from common.engine import loading
from common.engine.devices.cpu.device import CpuDevice
from common.engine.kv.memory import OVERHEAD_BYTES, check_weights_fit, largest_step, room_for_cache
from common.values.config import ModelConfig, WorkerConfig
from tests.tiny_model import TinyModel, write_tiny_model

GB = 1 << 30


@dataclass
class Card:
    """A device's memory on paper."""

    total_bytes: int
    free_bytes: int
    held_bytes: int = 0
    peak_bytes: int = 0
    num_runs: int = 0

    def total(self) -> int:
        return self.total_bytes

    def free(self) -> int:
        return self.free_bytes

    def held(self) -> int:
        return self.held_bytes

    def peak_of(self, run: Callable[[], object]) -> int:
        run()
        self.num_runs += 1
        return self.peak_bytes


def test_what_is_left_is_the_share_less_the_peak_and_what_torch_does_not_count() -> None:
    card = Card(80 * GB, free_bytes=60 * GB, held_bytes=18 * GB)
    assert room_for_cache(card, 0.5, 20 * GB) == 40 * GB - 20 * GB - OVERHEAD_BYTES


def test_what_another_process_has_taken_is_not_left() -> None:
    card = Card(80 * GB, free_bytes=10 * GB, held_bytes=18 * GB)
    assert room_for_cache(card, 0.9, 20 * GB) == 28 * GB - 20 * GB - OVERHEAD_BYTES


def test_a_card_with_nothing_left_is_refused_with_what_takes_it() -> None:
    card = Card(24 * GB, free_bytes=6 * GB, held_bytes=16 * GB)
    with pytest.raises(CheckpointError, match=r"largest step take 23.6 GB.*of the 25.8 GB.*6.4 GB are free"):
        room_for_cache(card, 1.0, 22 * GB)


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (0.75, r"2 ranks \(tensor_parallel_size\), or 8 bits a weight"),
        (0.4, r"3 ranks \(tensor_parallel_size\), or 4 bits a weight"),
        (0.21, r"5 ranks \(tensor_parallel_size\), which"),
    ],
)
def test_weights_that_do_not_fit_are_told_over_how_many_ranks_or_in_how_many_bits(
    tmp_path: Path, part: float, said: str
) -> None:
    """On a card that has room for `part` of them."""
    checkpoint = open_checkpoint(write_tiny_model(tmp_path / "m"))
    num_bytes = 2 * sum(prod(tensor.shape) for tensor in checkpoint.tensors.values())
    check_weights_fit(checkpoint, torch.bfloat16, Card(num_bytes + OVERHEAD_BYTES, 0), 1.0)
    with pytest.raises(CheckpointError, match=said):
        check_weights_fit(checkpoint, torch.bfloat16, Card(int(num_bytes * part) + OVERHEAD_BYTES, 0), 1.0)


def test_the_largest_step_has_all_tokens_and_all_sequences_in_blocks_that_there_are() -> None:
    plan = largest_step(max_num_seqs=8, max_num_batched_tokens=100, max_len=64, block_size=5, num_groups=2)
    assert (len(plan.sequences), {seq.num_new for seq in plan.sequences}) == (8, {12})
    assert plan.sequences[0].block_tables == ((0, 1, 2), (0, 1, 2))
    assert largest_step(8, 100, 10, 16, 1).num_tokens == 80
    assert len(largest_step(32, 4, 10, 16, 1).sequences) == 4


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_cache_is_sized_by_the_card_unless_it_is_configured(
    tmp_path: Path, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny_model(tmp_path / "m", TinyModel(architecture=architecture, num_layers=3))
    card = Card(4 * GB, free_bytes=4 * GB, peak_bytes=(5 * GB) // 2)

    def opened(config: WorkerConfig) -> CpuDevice:
        device = CpuDevice.open(config.dtype, config.quantization)
        monkeypatch.setattr(device, "memory", card, raising=False)
        return device

    monkeypatch.setattr(loading, "open_device", opened)
    config = WorkerConfig(
        role="decode", worker_id="d", model=ModelConfig(path=str(path)), dtype="float32", gpu_memory_utilization=1.0
    )
    loaded = loading.load_model(config)
    assert loaded.cache_bytes == GB // 2
    assert 0.99 * GB / 2 < loaded.cache.nbytes <= GB // 2
    assert card.num_runs == 1
    again = loading.refit(loaded, config.model_copy(update={"block_size": 32}))
    assert 0.99 * GB / 2 < again.cache.nbytes <= GB // 2
    small = loading.load_model(config.model_copy(update={"kv_cache_bytes": 1 << 22}))
    assert small.cache.nbytes <= 1 << 22
    assert card.num_runs == 1
