"""Every reachable state of small handoffs; `make explore` does the larger ones."""

import pytest

from kvtransfer import receiver, sender
from kvtransfer.events import TransferEnded
from tests.simkit.explorer import Violation, explore
from tests.simkit.handoff_world import Budget, HandoffWorld

MAX_STATES = 400_000
WORLDS = {
    "no fault": (Budget(), {}),
    "session breaks": (Budget(breaks=1), {}),
    "session breaks, another worker tries": (Budget(breaks=1), {"num_tries": 2, "num_senders": 2}),
    "chunk arrives corrupt": (Budget(corruptions=1), {}),
    "prefill worker cancels": (Budget(sender_cancels=1), {}),
    "decode worker cancels": (Budget(receiver_cancels=1), {}),
    "decode worker freezes": (Budget(freezes=1), {}),
    "deadline passes early": (Budget(deadlines=1), {}),
}
FAST = [name for name in WORLDS if "another" not in name]


@pytest.mark.parametrize("name", FAST)
def test_no_state_is_forbidden_and_every_state_leads_to_an_end(name: str) -> None:
    budget, shape = WORLDS[name]
    result = explore(HandoffWorld(budget, **shape), MAX_STATES)
    assert result.is_complete
    assert result.num_quiet > 0
    print(f"{name}: {result.num_states} states, {result.num_transitions} transitions, {result.num_quiet} ends")


def test_the_explorer_finds_blocks_given_back_under_a_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sender that ends a cancelled transfer without waiting for its packs: the shortest story is told."""

    def end_at_once(self: sender.SenderCore, transfer: sender.Transfer) -> None:
        if transfer.state is sender.TransferState.ENDING:
            self._end(transfer)

    monkeypatch.setattr(sender.SenderCore, "_end_if_unread", end_at_once)
    with pytest.raises(Violation, match="while a pack reads its blocks") as found:
        explore(HandoffWorld(Budget(sender_cancels=1)), MAX_STATES)
    assert "!cancel_prefill" in str(found.value)


def test_the_explorer_finds_blocks_given_back_under_a_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver that releases a withdrawn attempt at once."""
    real = receiver.ReceiverCore._release_if_unwritten

    def release_at_once(self: receiver.ReceiverCore, attempt: receiver.Attempt) -> None:
        attempt.num_writes = 0
        real(self, attempt)

    monkeypatch.setattr(receiver.ReceiverCore, "_release_if_unwritten", release_at_once)
    with pytest.raises(Violation, match=r"while a write touches its blocks|after it was released|written"):
        explore(HandoffWorld(Budget(receiver_cancels=1)), MAX_STATES)


def test_the_explorer_finds_a_transfer_that_ends_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    real = sender.SenderCore._end

    def end_twice(self: sender.SenderCore, transfer: sender.Transfer) -> None:
        real(self, transfer)
        self._effects.append(TransferEnded(transfer.transfer_id, transfer.outcome))  # type: ignore[arg-type]

    monkeypatch.setattr(sender.SenderCore, "_end", end_twice)
    with pytest.raises(Violation, match="ended twice"):
        explore(HandoffWorld(Budget()), MAX_STATES)


def test_the_explorer_finds_a_state_without_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver that never acknowledges: the sender's deadline ends it, but not as received."""
    monkeypatch.setattr(sender.SenderCore, "next_deadline_s", lambda self: None)
    monkeypatch.setattr(receiver.ReceiverCore, "_complete_if_all_written", lambda self, attempt, transfer: None)
    with pytest.raises(Violation, match="never ended"):
        explore(HandoffWorld(Budget()), MAX_STATES)
