"""Names of the Redis keys and the packed form of block hashes. Pure: no IO.

Three keys per life of a worker, all expiring with its lease, so that a crash leaves nothing behind:

    {namespace}:worker:{ref}   string  the registration as JSON; exists = the worker lives
    {namespace}:idx:{ref}      set     the first 16 bytes of each block hash that the worker caches
    {namespace}:seq:{ref}      string  number of the last batch applied to the set
    {namespace}:workers        set     the refs ever registered and not yet seen dead
    {namespace}:news           channel every change of a set, for the mirrors of routers
"""

from collections.abc import Iterable
from dataclasses import dataclass

from common.values.ids import BlockHash, WorkerRef

# The index is a hint: 16 of 32 bytes halve its memory, and a collision costs time, never correctness.
MEMBER_BYTES = 16


def pack(hashes: Iterable[BlockHash]) -> bytes:
    """The hashes' index members, one after another: one argument whatever their number."""
    return b"".join(block_hash[:MEMBER_BYTES] for block_hash in hashes)


@dataclass(frozen=True, slots=True)
class Keys:
    """The key names of one cluster."""

    namespace: str

    @property
    def workers(self) -> str:
        return f"{self.namespace}:workers"

    def lease(self, ref: WorkerRef) -> str:
        return f"{self.namespace}:worker:{ref}"

    def members(self, ref: WorkerRef) -> str:
        return f"{self.namespace}:idx:{ref}"

    def sequence(self, ref: WorkerRef) -> str:
        return f"{self.namespace}:seq:{ref}"

    @property
    def news(self) -> str:
        return f"{self.namespace}:news"
