"""Several ranks of one model in the threads of one process."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from common.engine.executor.collectives import SharedCollectives, connect_all, shared_bytes
from common.engine.kv.shared import map_shared_memory, new_shared_memory
from common.values.ranks import ranks_of

ResultT = TypeVar("ResultT")
SLOT_BYTES = 8 << 10  # so little that longer calls go in several pieces


def new_collectives(world_size: int, slot_bytes: int = SLOT_BYTES) -> list[SharedCollectives]:
    """Those of each rank."""
    memory = map_shared_memory(new_shared_memory(shared_bytes(world_size, slot_bytes)))
    peers = connect_all(world_size)
    return [SharedCollectives(rank, memory, peers[rank.rank]) for rank in ranks_of(world_size)]


def on_ranks(collectives: list[SharedCollectives], work: Callable[[SharedCollectives], ResultT]) -> list[ResultT]:
    """`work` of every rank at once. A rank whose work raises is lost to the others."""

    def run(own: SharedCollectives) -> ResultT:
        try:
            return work(own)
        except BaseException:
            own.close()
            raise

    with ThreadPoolExecutor(len(collectives)) as threads:
        return [future.result() for future in [threads.submit(run, each) for each in collectives]]
