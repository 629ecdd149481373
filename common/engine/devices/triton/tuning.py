"""Which of a few tilings is fastest on a device: measured once, when a model is loaded, and kept on disk.

The file is named by the device, triton's version and the source of all kernels, so a choice is never used for anything
else. Without a GPU nothing is measured and the first candidate stands. float32 has one candidate: there the order of
sums is promised to be the same everywhere.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import triton

from common.checkpoint.demo_model import cache_directory
from common.engine.contract.attention import AttentionBatch, LayerKV
from common.engine.devices.triton.decode_attention import DecodeTiles, decode_attention, decode_candidates
from common.engine.devices.triton.kv_layout import KVLayout
from common.engine.devices.triton.prefill_attention import PrefillTiles, prefill_attention, prefill_candidates
from common.telemetry.logs import get_logger

Measure = Callable[[Callable[[], object]], float]  # milliseconds of one call
PREFILL_LEN = 512  # new tokens of the sequence that prefill is measured with
DECODE_LEN, DECODE_SEQS = 1024, 16


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    """None = the kernel's own choice."""

    prefill: PrefillTiles | None = None
    decode: DecodeTiles | None = None


class TuningFile:
    """Choices by name. Safe for processes that tune at once: the file is replaced whole, and the last one's stands."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @classmethod
    def of_device(cls, device: str) -> "TuningFile":
        """The file of a device of this name, for these kernels and this triton."""
        sources = sorted(Path(__file__).parent.glob("*.py"))
        parts = [device.encode(), triton.__version__.encode(), *(source.read_bytes() for source in sources)]
        digest = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
        return cls(cache_directory() / "kernels" / f"tuned-{digest}.json")

    def choose(self, name: str, times_ms: Callable[[], Sequence[float]]) -> int:
        """Index of the fastest: as kept under `name`, else of `times_ms`, which is then kept."""
        kept = self._read()
        if name not in kept:
            measured = list(times_ms())
            kept[name] = measured.index(min(measured))
            self._write(kept)
        return kept[name]

    def _read(self) -> dict[str, int]:
        try:
            kept = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return {}
        named = kept.items() if isinstance(kept, dict) else ()
        return {name: choice for name, choice in named if isinstance(choice, int)}

    def _write(self, kept: dict[str, int]) -> None:
        """Best effort: on a read-only disk every start measures."""
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._path.parent, delete=False) as file:
                json.dump(kept, file, indent=1, sort_keys=True)
            os.replace(file.name, self._path)
        except OSError as error:
            get_logger().warning("tuning_not_kept", reason=str(error))


def tune_attention(
    file: TuningFile,
    kv: LayerKV,
    num_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    measure: Measure | None = None,
) -> AttentionTiles:
    """The fastest tilings for one layer `kv` of a cache, which is read as it is, and queries of `dtype`."""
    layout = KVLayout.of(kv)
    measure = measure or _bench
    shape = f"{num_heads}/{layout.num_kv_heads}x{head_dim} {dtype} {kv[0].dtype} block {kv[0].shape[1]}"

    def choose(name: str, attention: Callable[..., object], candidates: Sequence[object], batch: AttentionBatch) -> int:
        q = torch.zeros((len(batch.positions), num_heads, head_dim), dtype=dtype, device=kv[0].device)
        runs = [lambda tiles=tiles: attention(q, kv, batch, 1.0, tiles=tiles) for tiles in candidates]
        choice = file.choose(f"{name} {shape}", lambda: [_time_of(run, measure) for run in runs])
        return choice if choice < len(candidates) else 0

    prefills = prefill_candidates(head_dim, dtype, layout.kind)
    decodes = decode_candidates(head_dim, dtype, layout.kind)
    prefill = choose("prefill", prefill_attention, prefills, _one_batch(kv, 1, PREFILL_LEN, PREFILL_LEN))
    decode = choose("decode", decode_attention, decodes, _one_batch(kv, DECODE_SEQS, DECODE_LEN, 1))
    return AttentionTiles(prefills[prefill], decodes[decode])


def _time_of(run: Callable[[], object], measure: Measure) -> float:
    try:
        return measure(run)
    except triton.runtime.errors.OutOfResources:  # of shared memory or registers, on this device
        return float("inf")


def _bench(run: Callable[[], object]) -> float:
    return float(triton.testing.do_bench(run))


def _one_batch(kv: LayerKV, num_seqs: int, seq_len: int, num_new: int) -> AttentionBatch:
    """Equal sequences; blocks are used again where the cache is too small for all of them."""
    num_blocks, block_size = kv[0].shape[:2]
    blocks_each = -(-seq_len // block_size)
    tables = torch.arange(num_seqs * blocks_each, dtype=torch.int32, device=kv[0].device) % num_blocks
    tokens = torch.zeros(num_seqs * num_new, dtype=torch.int64, device=kv[0].device)
    return AttentionBatch(
        positions=tokens,
        slot_mapping=tokens,
        cu_seqlens_q=torch.arange(num_seqs + 1, dtype=torch.int32, device=kv[0].device) * num_new,
        seq_lens=torch.full((num_seqs,), seq_len, dtype=torch.int32, device=kv[0].device),
        block_tables=tables.view(num_seqs, blocks_each),
        max_query_len=num_new,
        max_seq_len=seq_len,
    )
