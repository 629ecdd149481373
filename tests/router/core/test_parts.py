"""The small parts of the router: loads, queue order, budget, streams, metrics, records."""

import asyncio
from dataclasses import dataclass, field

import pytest

from common.cores.fair_shares import FairShares
from common.telemetry.metrics import Metrics
from common.values.errors import Overloaded, WorkerFailed
from common.values.ids import AttemptId, RequestId
from common.values.messages import Refused, Reserve, WorkerStats
from common.values.request import FinishReason
from router.core.generation import Accepted, Failed, Finished, RequestTimings, Tokens
from router.core.request_state import MAX_KEPT_DECISIONS, Request, RouterAttempt
from router.core.retry_budget import RetryBudget
from router.core.router_limits import RouterLimits
from router.core.waiting import AttemptQueue
from router.core.workers import Worker
from router.observe.request_metrics import NullMetrics, RequestMetrics
from router.service import GenerationStream
from tests.router.core.kit import Driver, request, token, worker_info


def attempt_of(spec_name: str, ordinal: int, priority: int = 0, attempt: int = 0) -> tuple[Request, RouterAttempt]:
    spec = request(spec_name, priority=priority)
    parent = Request(spec, ordinal, 0.0)
    return parent, RouterAttempt(AttemptId(spec.request_id, attempt), [0], spec.token_ids)


def test_queue_orders_by_priority_arrival_and_attempt_and_forgets_what_leaves() -> None:
    shares = FairShares()
    shares.begin({""})
    queue = AttemptQueue(shares)
    entries = [attempt_of("a", 1, 1), attempt_of("b", 2), attempt_of("c", 3, -2), attempt_of("d", 4, 1)]
    for entry in entries:
        queue.add(*entry)
    assert [attempt.attempt_id.request_id for _, attempt in queue] == ["c", "b", "a", "d"]
    for _, attempt in queue:  # leaving while others look is allowed
        queue.discard(attempt.attempt_id)
        queue.discard(attempt.attempt_id)
    assert len(queue) == 0
    assert entries[0][1].attempt_id not in queue


def test_retry_budget_allows_a_burst_and_then_a_rate() -> None:
    budget = RetryBudget(capacity=3, per_s=2.0)
    assert [budget.try_spend(0.0) for _ in range(4)] == [True, True, True, False]
    assert not budget.try_spend(0.4)
    assert budget.try_spend(0.5)
    assert [budget.try_spend(1000.0) for _ in range(4)] == [True, True, True, False]


def make_worker() -> Worker:
    return Worker(worker_info("p0"), "p0:1", WorkerStats(), 0.0)


def test_load_is_the_report_plus_what_was_placed_since() -> None:
    worker, attempt_id = make_worker(), AttemptId(RequestId("a"), 0)
    worker.place(attempt_id, 0.0, tokens=100)
    assert (worker.tokens.value, worker.sequences.value) == (100, 1)
    worker.report(WorkerStats(num_waiting_uncached_tokens=250, num_waiting=3), 0.0)
    assert (worker.tokens.value, worker.sequences.value) == (250, 3)
    worker.tokens_computed(attempt_id)
    assert worker.tokens.value == 150
    worker.release(attempt_id)
    assert (worker.tokens.own, worker.sequences.own) == (0, 0)


def test_load_is_never_below_what_is_ours() -> None:
    worker = make_worker()
    worker.place(AttemptId(RequestId("a"), 0), 0.0, tokens=100)
    worker.report(WorkerStats(), 0.0)  # made before the placement arrived
    assert worker.tokens.value == 100


def test_refusals_back_off_up_to_a_bound_and_acceptance_resets_it() -> None:
    worker = make_worker()
    pauses = []
    for idx in range(40):
        attempt_id = AttemptId(RequestId("a"), idx)
        worker.place(attempt_id, float(idx))
        worker.refused(attempt_id, float(idx))
        pauses.append(worker.closed_until_s - idx)
    assert pauses[:5] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6])
    assert max(pauses) == 2.0
    worker.accepted()
    assert (worker.num_refusals, worker.closed_until_s) == (0, 0.0)


def test_burst_that_is_refused_counts_as_one_refusal() -> None:
    worker = make_worker()
    attempt_ids = [AttemptId(RequestId("a"), idx) for idx in range(20)]
    for attempt_id in attempt_ids:
        worker.place(attempt_id, 1.0)
    for attempt_id in attempt_ids:
        worker.refused(attempt_id, 1.5)
    assert worker.closed_until_s == pytest.approx(1.6)


async def test_stream_joins_tokens_that_nobody_has_read_yet() -> None:
    stream = GenerationStream()
    stream.push(Accepted("p0", "d0", 4, 0))
    for position in range(3):
        stream.push(Tokens((token(position),)))
    stream.push(Finished(4, 3, 0))
    events = [event async for event in stream]
    assert [type(event) for event in events] == [Accepted, Tokens, Finished]
    assert events[1] == Tokens((token(0), token(1), token(2)))


async def test_stream_wakes_its_reader_and_ends_after_the_last_event() -> None:
    stream = GenerationStream()
    reading = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    stream.push(Failed(Overloaded("full")))
    assert isinstance(await reading, Failed)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    with pytest.raises(AssertionError):
        stream.push(Finished(1, 1, 0))


@dataclass
class Recorded:
    """Metrics that remember."""

    values: list[tuple[str, float, dict[str, str]]] = field(default_factory=list)

    def inc(self, name: str, amount: float = 1.0, **labels: str) -> None:
        self.values.append((name, amount, labels))

    set = observe = inc

    def of(self, name: str) -> list[tuple[float, dict[str, str]]]:
        return [(value, labels) for given, value, labels in self.values if given == name]


def test_request_metrics_come_from_the_events() -> None:
    recorded = Recorded()
    metrics = RequestMetrics(recorded)
    request_id = RequestId("r")
    metrics.submitted(request("r"), 10.0)
    metrics.delivered(request_id, Tokens((token(0),)), 10.5)
    metrics.delivered(request_id, Tokens((token(1), token(2, finish=FinishReason.STOP))), 10.7)
    kv = {"kv_bytes": 9, "kv_chunks": 1, "kv_exposed_s": 0.01, "decode_queue_s": 0.02}
    timings = RequestTimings(route_s=0.1, time_to_first_token_s=0.5, wall_s=0.9, **kv)  # type: ignore[arg-type]
    metrics.delivered(request_id, Finished(64, 3, 48, timings), 10.9)
    assert recorded.of("pdserve_time_to_first_token_seconds") == [(pytest.approx(0.5), {})]
    assert recorded.of("pdserve_inter_token_latency_seconds") == [(pytest.approx(0.2), {})]
    assert recorded.of("pdserve_generation_tokens") == [(1, {}), (2, {})]
    assert recorded.of("pdserve_request_finished") == [(1.0, {"finished_reason": "stop"})]
    assert recorded.of("pdserve_prompt_tokens_cached") == [(48, {})]
    assert recorded.of("pdserve_time_per_output_token_seconds") == [(pytest.approx(0.2), {})]
    assert len(recorded.of("pdserve_phase_duration_seconds")) == 6
    assert recorded.of("pdserve_kv_transfer_bytes") == [(9, {})]
    assert recorded.of("pdserve_kv_handover_seconds") == [(pytest.approx(0.03), {})]


def test_refusals_at_the_door_are_counted_apart_from_failures() -> None:
    recorded = Recorded()
    metrics = RequestMetrics(recorded)
    for error in (Overloaded("full"), WorkerFailed("lost")):
        metrics.submitted(request("r"), 0.0)
        metrics.delivered(RequestId("r"), Failed(error), 1.0)
    assert recorded.of("pdserve_admission_rejections") == [(1.0, {"reason": "queue_full"})]
    assert [labels["error_type"] for _, labels in recorded.of("pdserve_requests")] == ["queue_full", "worker_lost"]


@pytest.mark.parametrize("sink", [Metrics("tiny", "router", "router-0"), NullMetrics()])
def test_every_metric_named_here_is_in_the_list(sink: Metrics | NullMetrics) -> None:
    metrics = RequestMetrics(sink)
    metrics.submitted(request("r"), 0.0)
    metrics.delivered(RequestId("r"), Tokens((token(0),)), 0.5)
    metrics.delivered(RequestId("r"), Tokens((token(1, finish=FinishReason.STOP),)), 0.7)
    metrics.delivered(RequestId("r"), Finished(64, 2, 48, RequestTimings(kv_chunks=1)), 0.9)
    metrics.submitted(request("r"), 0.0)
    metrics.delivered(RequestId("r"), Failed(Overloaded("full")), 1.0)


def test_records_are_bounded_newest_first_and_hold_no_prompt() -> None:
    driver = Driver("p0", "d0", limits=RouterLimits(num_kept_requests=3))
    for idx in range(5):
        driver.submit(request(f"r{idx}", max_tokens=1))
        driver.grant("d0")
        driver.first_tokens("p0", token(0, finish=FinishReason.LENGTH))
        driver.take()
    driver.submit(request("live"))
    records = driver.core.newest_records(3, driver.now_s)
    assert [record["request_id"] for record in records] == ["live", "r4", "r3"]
    assert [record["status"] for record in records] == ["running", "finished", "finished"]
    assert driver.core.record(RequestId("r1"), driver.now_s) is None
    record = driver.core.record(RequestId("r4"), driver.now_s)
    assert record is not None
    assert record["finish_reasons"] == ["length"]
    assert "token_ids" not in str(record)


def test_record_explains_each_decision_with_its_costs() -> None:
    driver = Driver("p0", "p1", "d0")
    driver.cached_blocks = {"p1": 3}
    driver.submit(request())
    driver.grant("d0")
    record = driver.core.record(RequestId("r"), driver.now_s)
    assert record is not None
    decisions = record["decisions"]
    assert isinstance(decisions, list)
    decode, prefill = decisions
    assert (decode["role"], decode["chosen"], decode["why"]) == ("decode", "d0", "lowest cost")
    assert (prefill["role"], prefill["chosen"]) == ("prefill", "p1")
    costs = {candidate["worker_id"]: candidate["cost"] for candidate in prefill["candidates"]}
    assert costs["p1"] < costs["p0"]


def test_decisions_of_one_request_are_bounded() -> None:
    driver = Driver("p0", "d0")
    driver.submit(request(deadline_s=100.0))
    for _ in range(30):
        for message in driver.take("d0"):
            assert isinstance(message, Reserve)
            driver.say("d0", Refused(message.work.attempt_id, "no room", is_retryable=True))
        driver.advance(2.0)
    record = driver.core.record(RequestId("r"), driver.now_s)
    assert record is not None
    decisions, attempts = record["decisions"], record["attempts"]
    assert isinstance(decisions, list)
    assert isinstance(attempts, list)
    assert len(decisions) == MAX_KEPT_DECISIONS
    assert len(attempts) <= 17
