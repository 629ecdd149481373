"""The index in memory agrees with a naive model, and with what Redis does."""

from hypothesis import given, settings
from hypothesis import strategies as st

from common.cluster.memory import InMemoryIndex
from common.values.ids import WorkerRef
from tests.common.cluster.prefix_index.conftest import chain, registration

PROMPT = chain("prompt", 6)
BATCHES = st.lists(st.tuples(st.sets(st.integers(0, 5)), st.sets(st.integers(0, 5))), max_size=8)


@given(BATCHES)
@settings(deadline=None)
async def test_longest_prefix_is_the_leading_run_of_what_was_stored_and_not_evicted(
    batches: list[tuple[set[int], set[int]]],
) -> None:
    index = InMemoryIndex()
    who = registration("p0")
    index.register(who)
    held: set[int] = set()
    for stored, evicted in batches:
        index.writer(who.ref).publish([PROMPT[idx] for idx in stored], [PROMPT[idx] for idx in evicted])
        held = (held | stored) - evicted
    depth = next((idx for idx in range(6) if idx not in held), 6)
    found = await index.longest_prefix(PROMPT, [who.ref, WorkerRef("unknown", "a")])
    assert found == ({who.ref: depth} if depth else {})


async def test_a_deregistered_worker_and_its_blocks_are_gone() -> None:
    index = InMemoryIndex()
    who = registration("p0")
    index.register(who)
    index.writer(who.ref).publish(PROMPT, [])
    assert await index.live_workers() == [who]
    index.deregister(who.ref)
    assert await index.live_workers() == []
    assert await index.longest_prefix(PROMPT, [who.ref]) == {}
