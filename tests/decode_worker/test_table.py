"""Every event in every state of a decode attempt, late and duplicate ones included: where it ends up."""

from collections.abc import Callable

import pytest

from common.engine.contract.executor import StepFinished
from common.engine.contract.plan import StepResult
from common.values.errors import InvalidTransition
from common.values.ids import TransferId
from common.values.request import SampledToken
from common.worker.events import DrainRequested, RouterLost
from kvtransfer.events import (
    CancelAnnounced,
    ChunkAnnounced,
    ChunkReceived,
    ChunkWritten,
    FinishAnnounced,
    FirstToken,
    PeerLost,
    PeerReady,
)
from tests.core_bench import ROUTER, attempt, fail, finish, is_at_rest, phases_of, table_rows, tokens
from tests.decode_worker.harness import CHUNK, PREFILL, Bench, job

WORK = job("a", tokens(40), max_tokens=8, choices=(0, 1), deadline_s=50.0)
TRANSFER = TransferId(attempt("a"), 0)
OTHER_STEP = StepResult(99, (), 0.1)
FIRST = tuple(FirstToken(choice, SampledToken(choice)) for choice in (0, 1))


def absent(bench: Bench) -> None:
    pass


def reserved(bench: Bench) -> None:
    bench.reserve(WORK)


def local(bench: Bench) -> None:
    """Its prompt is being prefilled here."""
    bench.reserve(WORK, local=64)


def waiting(bench: Bench) -> None:
    """Received while a step runs without it."""
    bench.start(job("busy", tokens(20, first=900), max_tokens=2))
    bench.start(WORK)


def decoding(bench: Bench) -> None:
    bench.start(WORK)
    bench.step()


def preempted(bench: Bench) -> None:
    """One of its choices had to give its blocks to an older attempt."""
    bench.start(job("older", tokens(44, first=900), max_tokens=40))
    bench.start(WORK)
    while not bench.core.stats(bench.now_s).num_preemptions:
        bench.step()


def ending(bench: Bench) -> None:
    """Cancelled while received chunks are still being written."""
    bench.receiver.is_writing = True
    bench.reserve(WORK)
    bench.cancel("a")


STATES: list[Callable[[Bench], None]] = [absent, reserved, local, waiting, decoding, preempted, ending]


EVENTS: dict[str, Callable[[Bench], object]] = {
    "reserve": lambda bench: bench.reserve(WORK),
    "cancel": lambda bench: bench.cancel("a"),
    "cancel choice 0": lambda bench: bench.cancel("a", (0,)),
    "router lost": lambda bench: bench.handle(RouterLost(ROUTER)),
    "step finished": finish,
    "another step finished": lambda bench: bench.handle(StepFinished(OTHER_STEP)),
    "step failed": fail,
    "chunk announced": lambda bench: bench.handle(ChunkAnnounced(PREFILL, TRANSFER, CHUNK)),
    "chunk received": lambda bench: bench.handle(ChunkReceived(PREFILL, TRANSFER, 0)),
    "chunk written": lambda bench: bench.handle(ChunkWritten(TRANSFER, 0)),
    "finish announced": lambda bench: bench.handle(FinishAnnounced(PREFILL, TRANSFER, 1, FIRST)),
    "cancel announced": lambda bench: bench.handle(CancelAnnounced(PREFILL, TRANSFER, "x")),
    "peer comes and goes": lambda bench: [bench.handle(PeerReady(PREFILL)), bench.handle(PeerLost(PREFILL, "x"))],
    "deadline": lambda bench: bench.advance(50.0),
    "drain": lambda bench: bench.handle(DrainRequested(10.0)),
}

# One column per state. "-" = nothing of the attempt is known, "!" = raises InvalidTransition.
TABLE = """
                        absent   reserved local    waiting  decoding preempted ending
reserve                 reserved reserved ready    ready    ready    ready     ending
cancel                  -        -        -        -        -        -         ending
cancel choice 0         -        reserved ready    ready    ready    ready     ending
router lost             -        -        -        -        -        -         ending
step finished           !        !        ready    ready    ready    ready     !
another step finished   !        !        !        !        !        !         !
step failed             !        !        -        ready    -        -         !
chunk announced         -        reserved ready    ready    ready    ready     ending
chunk received          -        reserved ready    ready    ready    ready     ending
chunk written           -        reserved ready    ready    ready    ready     -
finish announced        -        ready    ready    ready    ready    ready     ending
cancel announced        -        reserved ready    ready    ready    ready     ending
peer comes and goes     -        reserved ready    ready    ready    ready     ending
deadline                -        -        -        -        -        -         ending
drain                   -        reserved ready    ready    ready    ready     ending
"""


def test_table_is_complete() -> None:
    assert {(event, state) for event, state, _ in table_rows(TABLE)} == {
        (event, state.__name__) for event in EVENTS for state in STATES
    }


@pytest.mark.parametrize(("event", "state", "outcome"), table_rows(TABLE))
def test_event_in_state(event: str, state: str, outcome: str) -> None:
    bench = Bench(num_blocks=7, budget=64, reservation_timeout_s=100.0)
    next(builder for builder in STATES if builder.__name__ == state)(bench)
    if outcome == "!":
        with pytest.raises(InvalidTransition):
            EVENTS[event](bench)
        return
    EVENTS[event](bench)
    assert phases_of(bench, "a") == outcome
    settle(bench)


def settle(bench: Bench) -> None:
    """Whatever it was, everything comes to its end and back to the pool."""
    bench.run_all()
    bench.cancel("a")
    bench.finish_writing("a")
    bench.run_all()
    assert is_at_rest(bench)
