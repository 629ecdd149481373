"""`TritonBackend`: the attention of the model on a GPU, or under Triton's interpreter on the CPU.

Imports triton: import this module only where the triton path was chosen.
"""

import torch

from common.engine.contract.attention import AttentionBatch, AttentionOptions
from common.engine.devices.triton.decode_attention import decode_attention
from common.engine.devices.triton.launch import require_runnable
from common.engine.devices.triton.prefill_attention import prefill_attention
from common.engine.devices.triton.rope_write import rope_and_write
from common.engine.devices.triton.tuning import AttentionTiles

SHORT_QUERY_LEN = 64  # up to here the prefill kernel has smaller tiles, which are not tuned


class TritonBackend:
    """`AttentionBackend` by Triton kernels. Stateless; everything runs on the current stream of q's device."""

    def __init__(self, tiles: AttentionTiles | None = None) -> None:
        """Raises RuntimeError where kernels cannot run. `tiles` = None is the kernels' own choice."""
        require_runnable()
        self._tiles = tiles or AttentionTiles()

    def rope_and_write(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos_sin: torch.Tensor,
        kv: torch.Tensor,
        batch: AttentionBatch,
    ) -> torch.Tensor:
        """Rotate q and k, write k and v to their slots (below 0: not written); returns the rotated q."""
        return rope_and_write(q, k, v, cos_sin, batch.positions, kv, batch.slot_mapping)

    def attend(
        self, q: torch.Tensor, kv: torch.Tensor, batch: AttentionBatch, options: AttentionOptions
    ) -> torch.Tensor:
        """A step of single tokens splits the keys over programs; any other mix goes through the prefill kernel."""
        parts = (q, kv, batch, options.scale)
        tuned, window, soft_cap = self._tiles, options.window, options.soft_cap
        if batch.max_query_len <= 1:
            return decode_attention(*parts, window=window, soft_cap=soft_cap, tiles=tuned.decode)
        tiles = tuned.prefill if batch.max_query_len > SHORT_QUERY_LEN else None
        return prefill_attention(*parts, window=window, soft_cap=soft_cap, tiles=tiles)
