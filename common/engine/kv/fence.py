"""Order between the stream that computes KV and the streams that copy it. Owns events, no memory.

The compute thread launches far ahead of the GPU: that a layer's kernel was launched does not mean that it ran. A copy
waits on its own stream, so neither thread is held up.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Fence(Protocol):
    """`mark` and `mark_step` are called by the compute thread, the others by copying threads for their own streams."""

    def mark(self, num_layers: int) -> None:
        """The KV of layers [0, num_layers) is launched for every token of the step."""
        ...

    def mark_step(self) -> None:
        """Everything of the step is launched."""
        ...

    def wait_for_layers(self, stream: "torch.cuda.Stream | None", num_layers: int) -> None:
        """What `stream` does from now on comes after all KV of layers [0, num_layers) launched so far."""
        ...

    def wait_for_all(self, stream: "torch.cuda.Stream | None") -> None:
        """What `stream` does from now on comes after everything launched so far, reads of KV included."""
        ...


class StreamFence:
    """`Fence` by CUDA events, a new one per mark: one that somebody waits for is not recorded again."""

    # Any: torch's streams and events, or what a test has in their place.
    def __init__(
        self,
        num_layers: int,
        new_event: Callable[[], Any] = torch.cuda.Event,
        current_stream: Callable[[], Any] = torch.cuda.current_stream,
    ) -> None:
        self._new_event = new_event
        self._current_stream = current_stream
        self._stream: Any = None  # the compute thread's
        self._events: list[Any] = [None] * num_layers  # [i]: after the KV of layer i was last launched

    def mark(self, num_layers: int) -> None:
        self._events[num_layers - 1] = self._record()

    def mark_step(self) -> None:
        self._events[:] = [self._record()] * len(self._events)

    def wait_for_layers(self, stream: Any, num_layers: int) -> None:
        event = self._events[num_layers - 1]
        if event is not None:
            stream.wait_event(event)

    def wait_for_all(self, stream: Any) -> None:
        if self._stream is not None:
            stream.wait_stream(self._stream)

    def _record(self) -> Any:
        self._stream = self._current_stream()
        event = self._new_event()
        event.record(self._stream)
        return event
