"""The router's streams to workers, for worlds that are explored: ordered, and each side hears of the end for itself."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from common.values.messages import WorkerMessage
from router.core.events import WorkerMessageReceived
from tests.simkit.handoff_parts import ref_of


@dataclass(slots=True)
class RouterStream:
    """One stream. What was under way when it was cut is lost."""

    is_cut: bool = False
    worker_knows: bool = True  # that it is there: hears of its end later
    router_knows: bool = True
    to_worker: list[Any] = field(default_factory=list)
    to_router: list[WorkerMessageReceived] = field(default_factory=list)


class Streams:
    """Owns the streams, by the name of the worker's life."""

    def __init__(self) -> None:
        self._streams: dict[str, RouterStream] = {}

    def of(self, name: str) -> RouterStream:
        return self._streams[name]

    def open_names(self) -> list[str]:
        return [name for name, stream in self._streams.items() if not stream.is_cut]

    def choices(self, living: Iterable[str]) -> list[str]:
        choices = []
        for name, stream in self._streams.items():
            choices += [f"to_worker {name}"] if stream.to_worker else []
            choices += [f"to_router {name}"] if stream.to_router else []
            choices += [f"worker_hears_end {name}"] if stream.is_cut and stream.worker_knows else []
            choices += [f"router_hears_end {name}"] if stream.is_cut and stream.router_knows else []
        return choices + [f"reconnect {name}" for name in living if self._can_connect(name)]

    def _can_connect(self, name: str) -> bool:
        return name not in self._streams or not self._streams[name].router_knows

    def is_end_unheard_by_worker(self, name: str) -> bool:
        return name in self._streams and self._streams[name].worker_knows

    def is_believed(self, name: str) -> bool:
        """Whether the router takes the stream for open: it has not heard of an end."""
        return name in self._streams and self._streams[name].router_knows

    def open(self, name: str) -> None:
        self._streams[name] = RouterStream()

    def cut(self, name: str) -> None:
        if name in self._streams:
            stream = self._streams[name]
            stream.is_cut = True
            stream.to_worker, stream.to_router = [], []

    def kill(self, name: str) -> None:
        """The worker is dead: it hears nothing more."""
        if name in self._streams:
            self.cut(name)
            self.worker_heard(name)

    def worker_heard(self, name: str) -> None:
        self._streams[name].worker_knows = False
        self._forget_if_over(name)

    def router_heard(self, name: str) -> None:
        self._streams[name].router_knows = False
        self._forget_if_over(name)

    def send_to_worker(self, name: str, message: Any) -> None:
        if name in self._streams and not self._streams[name].is_cut:
            self._streams[name].to_worker.append(message)

    def send_to_router(self, name: str, message: WorkerMessage) -> None:
        if name in self._streams and not self._streams[name].is_cut:
            self._streams[name].to_router.append(WorkerMessageReceived(ref_of(name), message))

    def _forget_if_over(self, name: str) -> None:
        if not self._streams[name].worker_knows and not self._streams[name].router_knows:
            del self._streams[name]
