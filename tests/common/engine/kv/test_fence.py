"""A copy is never ahead of the kernels that compute what it copies: by the calls that a stream gets."""

from typing import Any

import pytest

from common.engine.kv.fence import StreamFence


class Stream:
    """Executes nothing until told to; an event happens when its stream comes to it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self._name = name
        self._log = log
        self._queue: list[Any] = []

    def launch(self, what: str) -> None:
        self._queue.append(what)

    def wait_event(self, event: "Event") -> None:
        self._queue.append(event)

    def wait_stream(self, other: "Stream") -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)

    def run(self) -> None:
        """As far as it gets."""
        while self._queue:
            head = self._queue[0]
            if isinstance(head, Event) and head.stream is self:
                head.has_happened = True
            elif isinstance(head, Event) and not head.has_happened:
                return
            elif isinstance(head, str):
                self._log.append(f"{self._name} {head}")
            self._queue.pop(0)


class Event:
    def __init__(self) -> None:
        self.has_happened = False
        self.stream: Stream | None = None

    def record(self, stream: Stream) -> None:
        assert self.stream is None, "an event that somebody may wait for is recorded again"
        self.stream = stream
        stream.wait_event(self)


class Rig:
    def __init__(self) -> None:
        self.log: list[str] = []
        self.compute, self.copy = Stream("compute", self.log), Stream("copy", self.log)
        self.fence = StreamFence(3, Event, lambda: self.compute)

    def launch_step(self, step: int) -> None:
        for layer in range(3):
            self.compute.launch(f"write {step}.{layer}")
            self.fence.mark(layer + 1)
            self.compute.launch(f"attend {step}.{layer}")
        self.fence.mark_step()

    def run(self) -> list[str]:
        """The copy stream is tried first each time: it runs whenever it may."""
        for _ in range(4):
            self.copy.run()
            self.compute.run()
        self.copy.run()
        return self.log


def test_a_pack_of_early_layers_waits_for_their_kernels_and_not_for_later_ones() -> None:
    rig = Rig()
    rig.compute.launch("write 0.0")
    rig.fence.mark(1)
    rig.fence.wait_for_layers(rig.copy, 1)
    rig.copy.launch("pack")
    rig.copy.run()
    assert rig.log == []
    rig.compute.run()
    rig.compute.launch("attend 0.0")
    rig.copy.run()
    assert rig.log == ["compute write 0.0", "copy pack"]


@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_a_pack_after_the_step_was_launched_follows_the_layers_that_it_reads(num_layers: int) -> None:
    rig = Rig()
    rig.launch_step(0)
    rig.fence.wait_for_layers(rig.copy, num_layers)
    rig.copy.launch("pack")
    log = rig.run()
    assert log.index("copy pack") > log.index(f"compute write 0.{num_layers - 1}")


def test_a_pack_of_an_earlier_steps_tokens_waits_for_a_step_at_least() -> None:
    """Step 1 has only begun: the mark of layer 3 is step 0's, which is what wrote the tokens."""
    rig = Rig()
    rig.launch_step(0)
    rig.compute.launch("write 1.0")
    rig.fence.mark(1)
    rig.fence.wait_for_layers(rig.copy, 3)
    rig.copy.launch("pack")
    log = rig.run()
    assert log.index("copy pack") > log.index("compute write 0.2")


def test_an_unpack_waits_for_reads_that_were_launched_before_it() -> None:
    rig = Rig()
    rig.launch_step(0)
    rig.compute.launch("attend of the slots' last owner")
    rig.fence.wait_for_all(rig.copy)
    rig.copy.launch("unpack")
    assert rig.run()[-1] == "copy unpack"


def test_before_anything_was_computed_nothing_is_waited_for() -> None:
    rig = Rig()
    rig.fence.wait_for_layers(rig.copy, 2)
    rig.fence.wait_for_all(rig.copy)
    rig.copy.launch("unpack")
    rig.copy.run()
    assert rig.log == ["copy unpack"]
