"""Every event in every state of a prefill request, late and duplicate ones included: where it ends up."""

from collections.abc import Callable

import pytest

from common.engine.contract.executor import LayerComputed
from common.values.errors import InvalidTransition
from common.values.ids import TransferId, WorkerRef
from common.worker.events import DrainRequested, RouterLost
from kvtransfer.events import CancelledByPeer, ChunkPacked, ChunkSent, PeerLost, PeerReady
from tests.core_bench import ROUTER, attempt, fail, finish, is_at_rest, phases_of, table_rows, tokens
from tests.prefill_worker.harness import DECODE, Bench, prompt

TRY = 5
STRANGER = WorkerRef("d9", "1")
TRANSFER = TransferId(attempt("a"), TRY)


def ask(bench: Bench, prefill_try: int = TRY) -> None:
    bench.prefill(prompt("a", tokens(40), prefill_try=prefill_try, deadline_s=50.0))


def absent(bench: Bench) -> None:
    pass


def waiting(bench: Bench) -> None:
    bench.prefill(prompt("busy", tokens(64, first=900)))
    ask(bench)


def running(bench: Bench) -> None:
    ask(bench)


def computed(bench: Bench) -> None:
    ask(bench)
    bench.step()


def ended_in_step(bench: Bench) -> None:
    """Its sequence has blocks until the running step is over; nothing else knows of it."""
    ask(bench)
    bench.cancel("a")


def ending_in_transfer(bench: Bench) -> None:
    bench.sender.is_packing = True
    computed(bench)
    bench.cancel("a")


STATES: list[Callable[[Bench], None]] = [absent, waiting, running, computed, ended_in_step, ending_in_transfer]


def step_id(bench: Bench) -> int:
    return -1 if bench.plan is None else bench.plan.step_id


EVENTS: dict[str, Callable[[Bench], object]] = {
    "same try": ask,
    "older try": lambda bench: ask(bench, TRY - 1),
    "newer try": lambda bench: ask(bench, TRY + 1),
    "cancel": lambda bench: bench.cancel("a"),
    "router lost": lambda bench: bench.handle(RouterLost(ROUTER)),
    "layer": lambda bench: bench.handle(LayerComputed(step_id(bench), 1)),
    "layer of another step": lambda bench: bench.handle(LayerComputed(99, 1)),
    "step finished": finish,
    "step failed": fail,
    "acknowledged": lambda bench: bench.acknowledge("a", TRY),
    "cancelled by peer": lambda bench: bench.handle(CancelledByPeer(TRANSFER, "x")),
    "network noise": lambda bench: [
        bench.handle(event)
        for event in (
            PeerReady(DECODE),
            ChunkPacked(TRANSFER, 0),
            ChunkSent(TRANSFER, 0),
            PeerLost(WorkerRef("d9", "1"), "x"),
        )
    ],
    "deadline": lambda bench: bench.advance(50.0),
    "drain": lambda bench: bench.handle(DrainRequested(10.0)),
}

# One column per state. "-" = nothing of the attempt is known, "!" = raises InvalidTransition.
TABLE = """
                        absent   waiting  running         computed  ended_in_step   ending_in_transfer
same try                running  waiting  running         computed  waiting         ending
older try               running  waiting  running         computed  waiting         ending+running
newer try               running  waiting  waiting         running   waiting         ending+running
cancel                  -        -        -               -         -               ending
router lost             -        -        -               -         -               ending
layer                   !        waiting  running         !         -               !
layer of another step   !        !        !               !         !               !
step finished           !        running  computed        !         -               !
step failed             !        running  -               !         -               !
acknowledged            -        waiting  !               -         -               -
cancelled by peer       -        waiting  -               -         -               -
network noise           -        waiting  running         computed  -               ending
deadline                -        -        -               -         -               -
drain                   -        waiting  running         computed  -               ending
"""


def test_table_is_complete() -> None:
    assert {(event, state) for event, state, _ in table_rows(TABLE)} == {
        (event, state.__name__) for event in EVENTS for state in STATES
    }


@pytest.mark.parametrize(("event", "state", "outcome"), table_rows(TABLE))
def test_event_in_state(event: str, state: str, outcome: str) -> None:
    bench = Bench(budget=64, max_num_seqs=1)
    next(builder for builder in STATES if builder.__name__ == state)(bench)
    if outcome == "!":
        with pytest.raises((InvalidTransition, AssertionError)):
            EVENTS[event](bench)
        return
    EVENTS[event](bench)
    assert phases_of(bench, "a") == outcome
    settle(bench)


def settle(bench: Bench) -> None:
    """Whatever it was, everything comes to its end and back to the pool."""
    for _ in range(4):
        bench.run_all()
        for transfer_id in list(bench.sender.active):
            bench.handle(CancelledByPeer(transfer_id, "over"))
    assert is_at_rest(bench)
