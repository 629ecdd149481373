"""Attention batches for tests, built row by row and apart from `common.engine.executor.runner`."""

from dataclasses import dataclass

import torch

from common.engine.contract.attention import AttentionBatch


@dataclass(frozen=True, slots=True)
class Run:
    """`num_new` tokens of one sequence after `start` cached ones, in the blocks given."""

    start: int
    num_new: int
    blocks: tuple[int, ...]

    @property
    def seq_len(self) -> int:
        return self.start + self.num_new

    def slots(self, block_size: int) -> list[int]:
        """Of every position of the sequence."""
        return [self.blocks[p // block_size] * block_size + p % block_size for p in range(self.seq_len)]


def batch_of(runs: list[Run], block_size: int) -> AttentionBatch:
    width = max(len(run.blocks) for run in runs)
    return AttentionBatch(
        positions=torch.tensor([p for run in runs for p in range(run.start, run.seq_len)]),
        slot_mapping=torch.tensor([slot for run in runs for slot in run.slots(block_size)[run.start :]]),
        cu_seqlens_q=torch.tensor([0, *(sum(run.num_new for run in runs[: i + 1]) for i in range(len(runs)))]).int(),
        seq_lens=torch.tensor([run.seq_len for run in runs]).int(),
        block_tables=torch.tensor([run.blocks + (0,) * (width - len(run.blocks)) for run in runs]).int(),
        max_query_len=max(run.num_new for run in runs),
        max_seq_len=max(run.seq_len for run in runs),
    )


def scattered_runs(lens: list[tuple[int, int]], block_size: int, num_blocks: int, seed: int = 0) -> list[Run]:
    """(start, num_new) pairs over blocks that lie anywhere."""
    free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()
    runs = []
    for start, num_new in lens:
        count = -(-(start + num_new) // block_size)
        runs.append(Run(start, num_new, tuple(free[:count])))
        free = free[count:]
    return runs
