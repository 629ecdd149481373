"""`Collectives` of ranks on one machine: memory that all of them see, and a byte to each other rank that it is written.

A rank that waits sleeps in `recv`: no core is spent on waiting. What a sum costs is printed by
`python -m tests.bench.run --parts ranks`.
"""

import socket
from collections.abc import Mapping, Sequence
from itertools import combinations

import torch

from common.engine.contract.collectives import RankLost
from common.values.ranks import Rank

_NUM_SETS = 2  # one may be read while the next is written: a rank is never two calls ahead of another
_WRITTEN = b"w"


class SharedCollectives:
    """`Collectives`. `memory` (1-D uint8) is the same for all ranks; `peers` are sockets to the others, by rank."""

    def __init__(self, rank: Rank, memory: torch.Tensor, peers: Mapping[int, socket.socket]) -> None:
        self.rank = rank
        self._memory = memory
        self._peers = dict(peers)
        self._slots: dict[torch.dtype, list[torch.Tensor]] = {}
        self._turn = 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.view(-1)
        step = self._next(x.dtype).shape[1]
        for start in range(0, flat.shape[0], step):
            piece = flat[start : start + step]
            slots = self._next(x.dtype)[:, : piece.shape[0]]
            slots[self.rank.rank].copy_(piece)
            self._meet()
            torch.sum(slots, 0, out=piece)
        return x

    def gather(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        widest, is_first = max(sizes), self.rank.rank == 0
        result = x.new_empty((x.shape[0], sum(sizes))) if is_first else x
        num_rows = self._next(x.dtype).shape[1] // widest
        assert num_rows, f"a row of {widest} does not fit into the shared memory"
        for start in range(0, x.shape[0], num_rows):
            part = x[start : start + num_rows]
            slots = self._next(x.dtype)[:, : part.shape[0] * widest]
            if not is_first:
                slots[self.rank.rank][: part.numel()].view(part.shape).copy_(part)
            self._meet()
            if is_first:
                _put_together(result[start : start + num_rows], part, slots, sizes)
        return result

    def close(self) -> None:
        """The others find this rank lost."""
        for peer in self._peers.values():
            peer.close()

    def _next(self, dtype: torch.dtype) -> torch.Tensor:
        """What this turn is written to, [world_size, elements]."""
        if dtype not in self._slots:
            count = _NUM_SETS * self.rank.world_size
            unit = count * dtype.itemsize
            usable = self._memory[: self._memory.shape[0] // unit * unit]
            sets = usable.view(dtype).view(_NUM_SETS, self.rank.world_size, -1)
            self._slots[dtype] = list(sets)
        return self._slots[dtype][self._turn]

    def _meet(self) -> None:
        """Returns when every rank has written; from then on the next turn's memory is written."""
        try:
            for peer in self._peers.values():
                peer.send(_WRITTEN)
            for rank, peer in self._peers.items():
                if not peer.recv(1):
                    raise RankLost(f"rank {rank} is gone")
        except OSError as error:
            raise RankLost(f"another rank is gone: {type(error).__name__}") from error
        self._turn = (self._turn + 1) % _NUM_SETS


def shared_bytes(world_size: int, slot_bytes: int) -> int:
    """Memory for so many ranks that each write up to `slot_bytes` at once. More than that is done in pieces."""
    return _NUM_SETS * world_size * slot_bytes


def connect_all(world_size: int) -> list[dict[int, socket.socket]]:
    """For each rank its sockets to the others, by their rank."""
    ends: list[dict[int, socket.socket]] = [{} for _ in range(world_size)]
    for one, other in combinations(range(world_size), 2):
        ends[one][other], ends[other][one] = socket.socketpair()
    return ends


def _put_together(target: torch.Tensor, own: torch.Tensor, slots: torch.Tensor, sizes: Sequence[int]) -> None:
    """The columns of all ranks, rank 0's first, into `target` [num_rows, sum(sizes)]."""
    num_rows = target.shape[0]
    target[:, : sizes[0]] = own
    at = sizes[0]
    for rank, size in enumerate(sizes[1:], 1):
        target[:, at : at + size] = slots[rank][: num_rows * size].view(num_rows, size)
        at += size
