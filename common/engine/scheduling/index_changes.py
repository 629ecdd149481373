"""What the prefix index has to hear of a worker's blocks. Pure: no IO."""

from collections.abc import Iterable

from common.values.ids import BlockHash


class IndexChanges:
    """Hashes that became findable and hashes that went, since the last `take`. One that did both is neither."""

    def __init__(self) -> None:
        self._is_stored: dict[BlockHash, bool] = {}

    def stored(self, block_hash: BlockHash) -> None:
        self._note(block_hash, is_stored=True)

    def evicted(self, hashes: Iterable[BlockHash]) -> None:
        for block_hash in hashes:
            self._note(block_hash, is_stored=False)

    def take(self) -> tuple[tuple[BlockHash, ...], tuple[BlockHash, ...]]:
        """(stored, evicted)"""
        changes, self._is_stored = self._is_stored, {}
        stored = tuple(block_hash for block_hash, is_stored in changes.items() if is_stored)
        return stored, tuple(block_hash for block_hash, is_stored in changes.items() if not is_stored)

    def _note(self, block_hash: BlockHash, *, is_stored: bool) -> None:
        before = self._is_stored.pop(block_hash, None)
        assert before is not is_stored, "stored or evicted twice"
        if before is None:
            self._is_stored[block_hash] = is_stored
