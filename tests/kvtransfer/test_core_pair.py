"""Sender and receiver cores over a fake wire, many seeds: nothing wrong ever, then heal and demand the end."""

from collections import Counter

import pytest

from kvtransfer.events import TransferOutcome
from tests.kvtransfer.fake_wire import Wire

NUM_SEEDS = 2400
NUM_STEPS = 250


def run(seed: int) -> Wire:
    wire = Wire(seed)
    for _ in range(NUM_STEPS):
        wire.step()
    wire.settle()
    return wire


def check_end(wire: Wire) -> None:
    """Every transfer and attempt ended exactly once, on both sides, and both agree on DONE."""
    started = {transfer_id for sender in wire.senders for transfer_id in sender.live} | set(wire.ended)
    assert wire.ended == Counter(dict.fromkeys(started, 1))
    assert wire.closed == Counter(dict.fromkeys(wire.expected, 1))
    assert set(wire.failed.values()) <= {1}
    for transfer_id, outcome in wire.outcomes.items():
        if outcome == TransferOutcome.DONE:
            assert wire.received[transfer_id.attempt_id] == transfer_id
    assert wire.receiver.num_attempts == 0
    assert all(sender.core.num_transfers == 0 for sender in wire.senders)
    assert not wire.writes


@pytest.mark.parametrize("group", range(8))
def test_every_transfer_ends_once_on_each_side_whatever_happens(group: int) -> None:
    for seed in range(group * NUM_SEEDS // 8, (group + 1) * NUM_SEEDS // 8):
        try:
            check_end(run(seed))
        except BaseException as error:
            raise AssertionError(f"seed {seed} failed") from error


def test_without_faults_one_try_of_every_attempt_is_done() -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(50):
        wire = Wire(seed)
        wire.fault_rate = 0.0
        while len(wire.received) < len(wire.attempts) or any(wire.next_try[attempt] < 3 for attempt in wire.attempts):
            wire.step()
        wire.settle()
        check_end(wire)
        outcomes.update(wire.outcomes.values())
    assert outcomes == {TransferOutcome.DONE: 50 * 4, TransferOutcome.CANCELLED: 50 * 8}


def test_a_seed_replays_to_the_same_event_log() -> None:
    assert run(7).log == run(7).log


def test_the_seeds_reach_every_kind_of_end() -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(100):
        outcomes.update(run(seed).outcomes.values())
    assert set(outcomes) == set(TransferOutcome)
