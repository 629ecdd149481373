"""The loop that runs a core: order, re-entrance, deadlines, threads."""

import asyncio
import threading
from collections.abc import Sequence

import pytest

from common.cores.core_loop import CoreLoop


class Echo:
    """A core that repeats events as effects and asks for one deadline."""

    def __init__(self) -> None:
        self.deadline_s: float | None = None

    def handle(self, event: str, now_s: float) -> Sequence[str]:
        if event.startswith("at "):
            self.deadline_s = now_s + float(event[3:])
            return []
        return [event, f"{event}!"]

    def handle_deadline(self, now_s: float) -> Sequence[str]:
        self.deadline_s = None
        return ["deadline"]

    def next_deadline_s(self) -> float | None:
        return self.deadline_s

    def check_invariants(self) -> None: ...


async def test_effects_come_in_the_order_of_their_events() -> None:
    seen: list[str] = []
    loop = CoreLoop(Echo(), seen.append)
    loop.post("a")
    loop.post("b")
    assert seen == ["a", "a!", "b", "b!"]


async def test_an_event_posted_by_an_effect_waits_for_the_other_effects() -> None:
    seen: list[str] = []

    def perform(effect: str) -> None:
        seen.append(effect)
        if effect == "a":
            loop.post("b")

    loop = CoreLoop(Echo(), perform)
    loop.post("a")
    assert seen == ["a", "a!", "b", "b!"]


async def test_a_deadline_fires_once_without_any_event() -> None:
    fired: asyncio.Queue[str] = asyncio.Queue()
    loop = CoreLoop(Echo(), fired.put_nowait)
    loop.post("at 0.01")
    assert await asyncio.wait_for(fired.get(), 60) == "deadline"
    await asyncio.sleep(0.02)
    assert fired.empty()


async def test_a_closed_loop_fires_no_deadline() -> None:
    seen: list[str] = []
    loop = CoreLoop(Echo(), seen.append)
    loop.post("at 0.01")
    loop.close()
    await asyncio.sleep(0.05)
    assert seen == []


async def test_events_after_the_end_are_handled_and_set_no_timer() -> None:
    seen: list[str] = []
    loop = CoreLoop(Echo(), seen.append)
    loop.close()
    loop.post("a")
    loop.post("at 0.01")
    await asyncio.sleep(0.05)
    assert seen == ["a", "a!"]


async def test_events_of_another_thread_arrive_in_the_loop() -> None:
    seen: asyncio.Queue[tuple[str, int]] = asyncio.Queue()
    loop = CoreLoop(Echo(), lambda effect: seen.put_nowait((effect, threading.get_ident())))
    await asyncio.to_thread(loop.post_threadsafe, "x")
    assert await asyncio.wait_for(seen.get(), 60) == ("x", threading.get_ident())


async def test_a_closed_event_loop_swallows_late_events() -> None:
    other = asyncio.new_event_loop()

    async def make() -> CoreLoop[str, str]:
        return CoreLoop(Echo(), lambda effect: None)

    loop = await asyncio.to_thread(other.run_until_complete, make())
    other.close()
    loop.post_threadsafe("late")


class Broken(Echo):
    """A core with a bug in its deadline and in one event."""

    def handle(self, event: str, now_s: float) -> Sequence[str]:
        assert event != "bug", "a bug"
        return super().handle(event, now_s)

    def handle_deadline(self, now_s: float) -> Sequence[str]:
        raise AssertionError("a bug at the deadline")


@pytest.mark.parametrize("event", ["bug", "at 0.01"])
async def test_a_bug_is_heard_by_whoever_waits_for_it_wherever_it_struck(event: str) -> None:
    """From another thread and from the timer nobody is there to catch it."""
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    loop = CoreLoop(Broken(), lambda effect: None)
    await asyncio.to_thread(loop.post_threadsafe, event)
    with pytest.raises(AssertionError, match="a bug"):
        await asyncio.wait_for(asyncio.shield(loop.failed), 60)


async def test_nothing_is_decided_after_a_failure() -> None:
    seen: list[str] = []
    loop = CoreLoop(Echo(), seen.append)
    loop.post("at 0.01")
    loop.fail(RuntimeError("the device is gone"))
    loop.post("late")
    await asyncio.sleep(0.05)
    assert seen == []
    with pytest.raises(RuntimeError, match="device"):
        await loop.failed
