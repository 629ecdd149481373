"""Every interleaving of one request through router, prefill and decode cores; `make explore` goes further."""

import pytest

from common.engine.kv.block_pool import RefKind
from common.values.ids import WorkerRef
from prefill_worker.core import PrefillCore
from prefill_worker.request import PrefillRequest
from router.core.request_state import Choice
from router.core.roster import Roster, RosterChange, StreamState
from tests.simkit.cluster_worlds import WORLDS, Setting
from tests.simkit.explorer import Violation


@pytest.mark.parametrize("name", WORLDS)
def test_the_request_is_answered_once_and_every_block_comes_back(name: str) -> None:
    setting = WORLDS[name]
    result = setting.explore()
    scope = "all" if result.is_complete else "the first"
    print(f"{name}: {scope} {result.num_states} states, {result.num_transitions} transitions, {result.num_quiet} ends")
    assert result.is_complete or setting.max_states is not None
    assert result.num_quiet > 0 or not result.is_complete


def test_the_explorer_finds_a_token_that_is_delivered_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token comes from both workers; a router that takes every position delivers it again."""

    def accept_all(self: Choice, event: object) -> list[object]:
        self.finish_reason = event.finish_reason  # type: ignore[attr-defined]
        self.token_ids.append(event.token.token_id)  # type: ignore[attr-defined]
        return [event]

    monkeypatch.setattr(Choice, "accept", accept_all)
    with pytest.raises(Violation, match="position 0 after"):
        Setting({}, {"chunk_tokens": 2}).explore()


def test_the_explorer_finds_blocks_that_are_given_back_under_a_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill worker that gives back what a cancelled request held without waiting for the transfer's end."""
    real = PrefillCore.end

    def end(self: PrefillCore, request: PrefillRequest, reason: str, now_s: float) -> None:
        self.state.scheduler.blocks.release_tables(request.block_tables, RefKind.HELD)
        request.block_tables = ()
        real(self, request, reason, now_s)

    monkeypatch.setattr(PrefillCore, "end", end)
    with pytest.raises(Violation, match=r"is free while|end of unknown transfer|AssertionError"):
        Setting({"leave": 1}, {"chunk_tokens": 2}).explore()


def test_the_explorer_finds_a_lost_link_that_nobody_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. the session breaks before the decode worker has heard of it; 2. the prefill worker keeps quiet."""
    real = PrefillCore._on_transfer_ended

    def keep_quiet(self: PrefillCore, ended: object, now_s: float) -> None:
        num_effects = len(self.state.effects)
        real(self, ended, now_s)  # type: ignore[arg-type]
        del self.state.effects[num_effects:]

    monkeypatch.setattr(PrefillCore, "_on_transfer_ended", keep_quiet)
    with pytest.raises(Violation, match="deadline"):
        Setting({"break": 1}, {"chunk_tokens": 2}).explore()


def test_the_explorer_finds_a_worker_that_is_given_up_because_redis_lost_its_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def follow(
        self: Roster, listed: frozenset[WorkerRef], streams: dict[WorkerRef, StreamState], now_s: float
    ) -> RosterChange:
        return RosterChange((), tuple(streams.keys() - listed), listed)

    monkeypatch.setattr(Roster, "follow", follow)
    with pytest.raises(Violation, match="whose stream is open"):
        Setting({"redis": 1}, {"chunk_tokens": 2}).explore()
