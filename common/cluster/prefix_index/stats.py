"""How much of the prefix index is where: blocks per worker, and what share of them others hold too. For people. Pure.

What two workers share is estimated from a sample of one's blocks, so that it costs little however large the index is.
No block hash leaves this module.
"""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import islice

from common.values.ids import WorkerRef

SAMPLE_SIZE = 64
# Every pair is compared; beyond this many workers they are only counted.
MAX_COMPARED = 12


@dataclass(frozen=True, slots=True)
class WorkerIndexStats:
    """One worker's part of the index. Shares are of its own blocks; None = not compared.

    `most_shared_with` is the worker that holds the largest share of them too, "" when none holds any.
    """

    worker_id: str
    num_blocks: int
    share_only_here: float | None = None
    most_shared_with: str = ""
    most_shared: float = 0.0


def index_stats(blocks: Mapping[WorkerRef, AbstractSet[bytes]]) -> tuple[WorkerIndexStats, ...]:
    """In the order of `blocks`."""
    if len(blocks) > MAX_COMPARED:
        return tuple(WorkerIndexStats(ref.worker_id, len(held)) for ref, held in blocks.items())
    return tuple(_compared(ref, blocks) for ref in blocks)


def _compared(ref: WorkerRef, blocks: Mapping[WorkerRef, AbstractSet[bytes]]) -> WorkerIndexStats:
    sample = list(islice(blocks[ref], SAMPLE_SIZE))  # of a set of hashes: any order is a random one
    if not sample:
        return WorkerIndexStats(ref.worker_id, 0)
    others = {other: held for other, held in blocks.items() if other != ref}
    shares = {other: sum(block in held for block in sample) / len(sample) for other, held in others.items()}
    num_only_here = sum(not any(block in held for held in others.values()) for block in sample)
    only_here = num_only_here / len(sample)
    best = max(shares, key=lambda other: shares[other], default=None)
    if best is None or shares[best] == 0.0:
        return WorkerIndexStats(ref.worker_id, len(blocks[ref]), only_here)
    return WorkerIndexStats(ref.worker_id, len(blocks[ref]), only_here, best.worker_id, shares[best])
