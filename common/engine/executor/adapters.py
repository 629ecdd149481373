"""The adapters that a runner has in memory, and those of a step."""

from collections.abc import Sequence
from itertools import repeat

import torch

from common.checkpoint import CheckpointError, ModelSpec
from common.checkpoint.adapters import open_adapter
from common.engine.contract.plan import ScheduledSequence
from common.engine.model.adapters import AdapterSet, LoadedAdapter, RowAdapters, read_adapter
from common.values.request import Adapter


class Adapters:
    """By digest. `add`, `use` and `discard` come from one thread, `of_step` from the compute thread: what a step may
    still want is not discarded."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, place: torch.device | str) -> None:
        self._spec = spec
        self._dtype = dtype
        self._place = place
        self._loaded: dict[str, LoadedAdapter] = {}
        self._order: dict[str, None] = {}
        self._last: tuple[tuple[LoadedAdapter, ...], AdapterSet] | None = None

    @property
    def digests(self) -> tuple[str, ...]:
        """Those in memory, the one that was used longest ago first."""
        return tuple(self._order)

    def use(self, digest: str) -> bool:
        """Whether it is in memory; it counts as used now."""
        if digest not in self._order:
            return False
        del self._order[digest]
        self._order[digest] = None
        return True

    def load(self, adapter: Adapter) -> LoadedAdapter:
        """Read it from its files, in any thread. Raises CheckpointError; also where they are not what was meant."""
        files = open_adapter(adapter.path, self._spec)
        if files.digest != adapter.digest:
            raise CheckpointError(f"{adapter.path} holds adapter {files.digest[:12]}, expected {adapter.digest[:12]}")
        try:
            return read_adapter(files, self._spec, self._dtype, self._place)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{adapter.path} cannot be read: {error}") from error

    def add(self, digest: str, adapter: LoadedAdapter) -> None:
        self._loaded[digest] = adapter
        self._order[digest] = None

    def discard(self, digest: str) -> None:
        del self._order[digest], self._loaded[digest]

    def of_step(self, sequences: Sequence[ScheduledSequence]) -> RowAdapters | None:
        """For the new tokens of the sequences, one after another; None = no sequence has an adapter."""
        digests = sorted({seq.adapter for seq in sequences} - {""})
        if not digests:
            return None
        numbers = {digest: idx for idx, digest in enumerate(digests)} | {"": -1}
        rows = [number for seq in sequences for number in repeat(numbers[seq.adapter], seq.num_new)]
        adapters = self._set_of(tuple(self._loaded[digest] for digest in digests))
        return RowAdapters(adapters, torch.tensor(rows, dtype=torch.int64, device=self._place))

    def _set_of(self, adapters: tuple[LoadedAdapter, ...]) -> AdapterSet:
        """Most steps have the adapters of the one before."""
        last = self._last
        if last is None or last[0] != adapters:
            last = self._last = adapters, AdapterSet(adapters)
        return last[1]
