"""Every row of the router's tables: each message of a worker in each phase of an attempt, on time, late and twice."""

from collections.abc import Callable
from typing import Any

import pytest

from common.values.errors import RequestCancelled
from common.values.ids import AttemptId
from common.values.messages import (
    AttemptFailed,
    AttemptTokens,
    Cancel,
    FirstTokens,
    Granted,
    HandoffReport,
    Prefill,
    PromptScored,
    Refused,
    Reserve,
    TokenBatch,
    TransferFailed,
)
from common.values.request import FinishReason, PromptLogprobs
from router.core import transitions
from router.core.events import (
    AttemptTimedOut,
    ChoiceStopped,
    EndRequested,
    PrefixFound,
    PrefixKey,
    RequestSubmitted,
    RequestTimedOut,
    WorkerLost,
)
from router.core.request_state import AttemptPhase, RequestState
from router.core.transitions import (
    DECODE_ROWS,
    OWN_ROWS,
    PREFILL_ROWS,
    REQUEST_ROWS,
    ignore,
)
from tests.router.core.kit import BLOCK_SIZE, FINGERPRINT, Driver, lose, ref, request, token
from tests.simkit.snapshots import key_of

Phase = AttemptPhase
ID = AttemptId(request().request_id, 0)
MESSAGES: dict[type, Any] = {
    Granted: Granted(ID, 0, is_local=False),
    Refused: Refused(ID, "no room", is_retryable=True, prefill_try=0),
    HandoffReport: HandoffReport(ID, 4096, 2, 0.2, 0.05, 0.01, 0, is_local=False),
    PromptScored: PromptScored(ID, PromptLogprobs(1, (-0.5,) * 62, (1,) * 62), 0),
    AttemptTokens: AttemptTokens(ID, (token(0), token(1))),
    TransferFailed: TransferFailed(ID, 0, "link lost"),
    AttemptFailed: AttemptFailed(ID, "step failed", is_retryable=True, prefill_try=0),
    FirstTokens: FirstTokens(ID, 0, (token(0),), 0.1, 0.2, 0),
}


def at(phase: AttemptPhase) -> Driver:
    """An attempt in a phase, on p0 and d0 as far as it is placed; p1 and d1 are idle, for GRANTED no p is there."""
    driver = Driver("d0", "p0") if phase is Phase.GRANTED else Driver("p0", "p1", "d0", "d1")
    driver.answers_lookups = phase is not Phase.LOOKING_UP
    if phase is Phase.QUEUED:
        for worker_id in ("d0", "d1"):
            driver.stats(worker_id, kv_blocks_free=0, kv_blocks_used=64)
    driver.submit(request(max_tokens=1 if phase is Phase.CLOSING else 4))
    if phase in (Phase.LOOKING_UP, Phase.QUEUED, Phase.RESERVING):
        driver.take()
        return driver
    if phase is Phase.GRANTED:
        lose(driver, "p0")
    driver.grant("d0", is_local=phase is Phase.LOCAL)
    if phase is Phase.DECODING:
        driver.first_tokens("p0")
        driver.report("d0", ID)
    if phase is Phase.CLOSING:
        driver.report("d0", ID)
        driver.tokens("d0", ID, token(0, finish=FinishReason.LENGTH))
    driver.take()
    return driver


def tell(driver: Driver, kind: type, worker_id: str) -> None:
    if kind is WorkerLost:
        lose(driver, worker_id)
    elif kind is AttemptTokens:
        driver.say(worker_id, TokenBatch((MESSAGES[kind],)))
    else:
        driver.say(worker_id, MESSAGES[kind])


def state_of(driver: Driver) -> bytes:
    """All that the core knows of requests and of what is placed where."""
    workers = {worker.ref: (worker.shares, worker.num_refusals) for worker in driver.core.workers}
    return key_of((driver.core._requests.live, workers))


def outcome(driver: Driver) -> str:
    """The phase of the live attempt, and what was sent."""
    record = driver.core.record(request().request_id, driver.now_s)
    assert record is not None
    attempts: Any = record["attempts"]
    sent = [f"{type(effect.message).__name__} {effect.worker.worker_id}" for effect in driver._sent]
    return ", ".join([attempts[-1]["phase"], *sent])


# What must come of each row that does something; all others must change nothing.
DECODE_OUTCOMES = {
    (Granted, Phase.ABSENT): "decoding, Cancel d1",
    (Granted, Phase.RESERVING): "prefilling, Prefill p0",
    (Refused, Phase.RESERVING): "reserving, Reserve d1",
    (HandoffReport, Phase.GRANTED): "decoding",
    (HandoffReport, Phase.PREFILLING): "decoding",
    (HandoffReport, Phase.LOCAL): "decoding",
    (HandoffReport, Phase.DECODING): "decoding",
    (PromptScored, Phase.LOCAL): "local",
    (AttemptTokens, Phase.GRANTED): "decoding",
    (AttemptTokens, Phase.PREFILLING): "decoding",
    (AttemptTokens, Phase.LOCAL): "decoding",
    (AttemptTokens, Phase.DECODING): "decoding",
    (TransferFailed, Phase.ABSENT): "decoding, Cancel d1",
    (TransferFailed, Phase.PREFILLING): "prefilling, Cancel p0, Prefill p1",
    (AttemptFailed, Phase.RESERVING): "reserving, Cancel d0, Reserve d1",
    (AttemptFailed, Phase.GRANTED): "queued, Cancel d0",
    (AttemptFailed, Phase.PREFILLING): "reserving, Cancel p0, Cancel d0, Reserve d1",
    (AttemptFailed, Phase.LOCAL): "reserving, Cancel d0, Reserve d1",
    (AttemptFailed, Phase.DECODING): "reserving, Cancel d0, Reserve d1",
    (WorkerLost, Phase.RESERVING): "reserving, Reserve d1",
    (WorkerLost, Phase.GRANTED): "queued",
    (WorkerLost, Phase.PREFILLING): "reserving, Cancel p0, Reserve d1",
    (WorkerLost, Phase.LOCAL): "reserving, Reserve d1",
    (WorkerLost, Phase.DECODING): "reserving, Reserve d1",
}
PREFILL_OUTCOMES = {
    (PromptScored, Phase.PREFILLING): "prefilling",
    (FirstTokens, Phase.PREFILLING): "prefilling",
    (FirstTokens, Phase.DECODING): "decoding",
    (Refused, Phase.PREFILLING): "prefilling, Prefill p1",
    (AttemptFailed, Phase.PREFILLING): "prefilling, Prefill p1",
    (WorkerLost, Phase.PREFILLING): "prefilling, Prefill p1",
    (Refused, Phase.DECODING): "decoding",
    (AttemptFailed, Phase.DECODING): "decoding",
    (WorkerLost, Phase.DECODING): "decoding",
    (FirstTokens, Phase.CLOSING): "ended",
    (Refused, Phase.CLOSING): "ended",
    (AttemptFailed, Phase.CLOSING): "ended",
    (WorkerLost, Phase.CLOSING): "ended",
}


@pytest.mark.parametrize(
    ("rows", "outcomes"), [(DECODE_ROWS, DECODE_OUTCOMES), (PREFILL_ROWS, PREFILL_OUTCOMES)], ids=["decode", "prefill"]
)
def test_every_row_that_does_something_has_an_outcome_here(rows: Any, outcomes: Any) -> None:
    assert {row for row, function in rows.items() if function is not ignore} == set(outcomes)


@pytest.mark.parametrize(("kind", "phase"), DECODE_ROWS, ids=lambda value: getattr(value, "__name__", value))
def test_what_a_decode_worker_says_in_every_phase(kind: type, phase: AttemptPhase) -> None:
    check_row(kind, phase, "d0" if phase is not Phase.ABSENT else "d1", DECODE_OUTCOMES.get((kind, phase)))


@pytest.mark.parametrize(("kind", "phase"), PREFILL_ROWS, ids=lambda value: getattr(value, "__name__", value))
def test_what_a_prefill_worker_says_in_every_phase(kind: type, phase: AttemptPhase) -> None:
    """After the decode worker took over, a failure of the prefill worker is no retry and no end."""
    check_row(kind, phase, "p0" if phase is not Phase.ABSENT else "p1", PREFILL_OUTCOMES.get((kind, phase)))


def check_row(kind: type, phase: AttemptPhase, worker_id: str, expected: str | None) -> None:
    driver = at(Phase.DECODING if phase is Phase.ABSENT else phase)
    before, delivered = state_of(driver), len(driver.events())
    tell(driver, kind, worker_id)
    if expected is None and kind is not WorkerLost:
        assert state_of(driver) == before
    if expected is None:
        assert (driver.take(), len(driver.events())) == ([], delivered)
        assert driver.other_effects == []
    else:
        assert outcome(driver) == expected
    driver.take()
    tokens = driver.token_ids()
    tell(driver, kind, worker_id)  # once more: nothing is delivered or counted twice
    assert driver.token_ids() == tokens
    assert sum("NoteRetry" in type(effect).__name__ for effect in driver.other_effects) <= 1


@pytest.mark.parametrize("kind", [Refused, AttemptFailed, FirstTokens])
def test_what_an_earlier_try_says_changes_nothing(kind: type) -> None:
    driver = at(Phase.PREFILLING)
    lose(driver, "p1")
    tell(driver, TransferFailed, "d0")
    driver.advance(1.0)
    assert isinstance(driver.take("p0")[-1], Prefill)
    before = state_of(driver)
    tell(driver, kind, "p0")
    assert state_of(driver) == before


@pytest.mark.parametrize("kind", MESSAGES)
@pytest.mark.parametrize("worker_id", ["p0", "d0"])
def test_what_a_worker_says_of_a_request_that_ended_gives_back_at_most_its_blocks(kind: type, worker_id: str) -> None:
    driver = at(Phase.DECODING)
    driver.feed(EndRequested(request().request_id, RequestCancelled("client left")))
    driver.take()
    tell(driver, kind, worker_id)
    is_held = worker_id == "d0" and kind in (Granted, TransferFailed)
    assert driver.take() == ([Cancel(ID)] if is_held else [])
    driver.assert_nothing_left()


@pytest.mark.parametrize("kind", MESSAGES)
def test_what_a_role_never_says_is_not_believed(kind: type) -> None:
    driver, rows = at(Phase.PREFILLING), {True: DECODE_ROWS, False: PREFILL_ROWS}
    for worker_id in ("d0", "p0"):
        if not any(event is kind for event, _ in rows[worker_id == "d0"]):
            before = state_of(driver)
            tell(driver, kind, worker_id)
            assert state_of(driver) == before


# ---- what the router finds by itself --------------------------------------------------------------------


@pytest.mark.parametrize("phase", [phase for event, phase in OWN_ROWS if event is PrefixFound])
def test_what_the_index_answers_counts_only_while_it_is_awaited(phase: AttemptPhase) -> None:
    driver = at(Phase.DECODING if phase is Phase.ABSENT else phase)
    attempt_id = AttemptId(ID.request_id, 7) if phase is Phase.ABSENT else ID
    found, before = PrefixFound(attempt_id, PrefixKey(FINGERPRINT, BLOCK_SIZE), ((ref("d1"), 3),)), state_of(driver)
    driver.feed(found)
    driver.feed(found)
    if phase is Phase.LOOKING_UP:
        assert [type(message) for message in driver.take("d1")] == [Reserve]
    else:
        assert (driver.take(), state_of(driver)) == ([], before)


@pytest.mark.parametrize("phase", [phase for event, phase in OWN_ROWS if event is AttemptTimedOut])
def test_an_attempts_deadline_is_that_of_its_phase(phase: AttemptPhase) -> None:
    """A phase that waits for the index or for workers has a row; the others have no deadline to reach."""
    waits = {Phase.ABSENT, Phase.LOOKING_UP, Phase.QUEUED, Phase.GRANTED, Phase.CLOSING}
    assert phase in waits
    for other in set(AttemptPhase) - waits - {Phase.ENDED}:
        assert ID not in at(other).core._requests.timers
        assert (AttemptTimedOut, other) not in OWN_ROWS


# ---- requests -------------------------------------------------------------------------------------------

REQUEST_EVENTS: dict[type, Callable[[], Any]] = {
    RequestSubmitted: lambda: RequestSubmitted(request()),
    EndRequested: lambda: EndRequested(request().request_id, RequestCancelled("client left")),
    ChoiceStopped: lambda: ChoiceStopped(request().request_id, 0),
}


@pytest.mark.parametrize(("kind", "state"), [row for row in REQUEST_ROWS if row[0] is not RequestTimedOut])
def test_what_clients_want_in_every_state(kind: type, state: RequestState) -> None:
    """The only choice stopped ends the request as a success, leaving as a failure; once, in any state.

    When every token is out already, leaving ends it as a success too, and there is no choice left to stop.
    """
    phases = {RequestState.WAITING: Phase.RESERVING, RequestState.CLOSING: Phase.CLOSING}
    driver = at(phases.get(state, Phase.DECODING))
    if state is RequestState.ABSENT:
        driver = Driver("p0", "d0")
    driver.feed(REQUEST_EVENTS[kind]())
    last = [type(event).__name__ for event in driver.events()][-1:]
    if state is RequestState.ABSENT:
        assert (last, len(driver.core.request_ids)) == ([], kind is RequestSubmitted)
    elif (kind, state) == (ChoiceStopped, RequestState.CLOSING):
        assert last == ["Tokens"]
    else:
        is_failed = kind is EndRequested and state is not RequestState.CLOSING
        assert last == ["Failed" if is_failed else "Finished"]
        driver.assert_nothing_left()


@pytest.mark.parametrize("phase", [Phase.RESERVING, Phase.DECODING])
def test_a_request_that_is_here_already_is_a_bug_of_the_shell(phase: AttemptPhase) -> None:
    with pytest.raises(AssertionError, match="RequestSubmitted while"):
        at(phase).submit(request())


def test_every_cell_is_a_function_of_the_tables_module() -> None:
    for rows in (REQUEST_ROWS, OWN_ROWS, DECODE_ROWS, PREFILL_ROWS):
        assert all(getattr(transitions, row.__name__) is row for row in rows.values())
