"""What the router remembers of the cluster's life: bounded, newest first, and nothing of any request's text."""

from common.values.ids import WorkerRef
from common.values.messages import Role, WorkerInfo, WorkerState, WorkerStats
from common.values.request import Fingerprint
from router.core.events import WorkerConnected, WorkerLost, WorkerMessageReceived, WorkersListed
from router.observe.event_log import EventLog, LoggedEvent

REF = WorkerRef("prefill-0", "aa")
INFO = WorkerInfo(
    ref=REF, role=Role.PREFILL, model_name="tiny", block_size=16, num_blocks=8, max_model_len=512, max_num_seqs=4,
    pid=7, fingerprint=Fingerprint(()),
)  # fmt: skip


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_workers_that_join_and_leave_are_noted_with_where_and_why() -> None:
    clock = Clock()
    log = EventLog(clock)
    log.note(WorkerConnected(INFO, "127.0.0.1:4000"))
    clock.now_s += 5.0
    log.note(WorkersListed(frozenset()))
    log.note(WorkerLost(REF, "silent for 4 s"))
    assert log.newest(10) == [
        LoggedEvent(2, 0.0, "lost", "prefill-0: silent for 4 s"),
        LoggedEvent(1, 5.0, "joined", "prefill-0, prefill at 127.0.0.1:4000"),
    ]


def test_a_worker_that_ends_after_a_drain_left_and_its_next_life_can_be_lost() -> None:
    log = EventLog(Clock())
    log.note(WorkerConnected(INFO, "127.0.0.1:4000"))
    log.note(WorkerMessageReceived(REF, WorkerStats(state=WorkerState.DRAINING)))
    log.note(WorkerLost(REF, "stream ended"))
    log.note(WorkerConnected(INFO, "127.0.0.1:4001"))
    log.note(WorkerMessageReceived(REF, WorkerStats()))
    log.note(WorkerLost(REF, "stream ended"))
    assert [event.kind for event in log.newest(10)] == ["lost", "joined", "left", "joined"]


def test_the_log_and_each_entry_are_bounded() -> None:
    log = EventLog(Clock(), max_entries=3)
    for idx in range(10):
        log.add("drain", f"{idx}" * 1000)
    assert [event.number for event in log.newest(10)] == [10, 9, 8]
    assert max(len(event.text) for event in log.newest(10)) == 300
    assert [event.number for event in log.newest(1)] == [10]
