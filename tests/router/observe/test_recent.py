"""The last minute: what it holds, what leaves it, and that it stays small."""

import pytest

from router.observe.recent import MAX_PAIRS, MAX_VALUES, Recent, RecentView, TransferRate, quantile


class Sink:
    """Where everything must arrive too."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, float, dict[str, str]]] = []

    def inc(self, name: str, amount: float = 1.0, **labels: str) -> None:
        self.calls.append(("inc", name, amount, labels))

    def set(self, name: str, value: float, **labels: str) -> None:
        self.calls.append(("set", name, value, labels))

    def observe(self, name: str, value: float, **labels: str) -> None:
        self.calls.append(("observe", name, value, labels))


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def recent(clock: Clock) -> Recent:
    return Recent(Sink(), clock)


def test_nothing_measured_is_none_and_not_zero(recent: Recent) -> None:
    view = recent.view()
    assert (view.ttft_p50_s, view.itl_p99_s, view.error_rate, view.prefix_hit_rate, view.exposed_share) == (None,) * 5
    assert (view.num_finished, view.generation_tokens_per_s, view.transfers) == (0, 0.0, ())


def test_everything_is_handed_on() -> None:
    sink = Sink()
    recent = Recent(sink, Clock())
    recent.inc("pdserve_requests", status="failed", error_type="worker_lost")
    recent.set("pdserve_workers", 2, state="ready")
    recent.observe("pdserve_time_to_first_token_seconds", 0.5)
    assert [call[:2] for call in sink.calls] == [
        ("inc", "pdserve_requests"),
        ("set", "pdserve_workers"),
        ("observe", "pdserve_time_to_first_token_seconds"),
    ]


def test_latencies_are_quantiles_of_the_window(recent: Recent, clock: Clock) -> None:
    recent.observe("pdserve_time_to_first_token_seconds", 9.0)
    clock.now_s += 61
    for value in range(100):
        recent.observe("pdserve_time_to_first_token_seconds", value / 100)
    view = recent.view()
    assert (view.ttft_p50_s, view.ttft_p99_s) == (0.5, 0.99)


def fill(recent: Recent) -> RecentView:
    for _ in range(3):
        recent.inc("pdserve_requests", status="finished", error_type="")
    recent.inc("pdserve_requests", status="failed", error_type="worker_lost")
    recent.inc("pdserve_requests", status="failed", error_type="request_cancelled")
    recent.inc("pdserve_request_retries", reason="decode_worker")
    recent.inc("pdserve_prompt_tokens", 400)
    recent.inc("pdserve_prompt_tokens_cached", 100)
    recent.inc("pdserve_generation_tokens", 50)
    recent.observe("pdserve_kv_transfer_seconds", 2.0)
    recent.observe("pdserve_kv_transfer_exposed_seconds", 0.5)
    return recent.view()


def test_rates_leave_out_what_clients_cancelled(recent: Recent) -> None:
    view = fill(recent)
    assert (view.num_finished, view.num_failed, view.num_retries) == (3, 1, 1)
    assert (view.error_rate, view.retry_rate, view.prefix_hit_rate, view.exposed_share) == (0.25, 0.25, 0.25, 0.25)
    assert (view.prompt_tokens_per_s, view.generation_tokens_per_s) == (80.0, 10.0)


def test_counts_leave_the_window(recent: Recent, clock: Clock) -> None:
    fill(recent)
    clock.now_s += 6
    assert (recent.view().num_finished, recent.view().generation_tokens_per_s) == (3, 0.0)
    clock.now_s += 60
    assert recent.view().num_finished == 0


def test_transfers_are_rates_per_pair_and_forgotten_when_idle(recent: Recent, clock: Clock) -> None:
    recent.transferred("p0", "d0", 1000)
    recent.transferred("p0", "d0", 4000)
    recent.transferred("p1", "d0", 500)
    assert recent.view().transfers == (TransferRate("p0", "d0", 1000.0, 2), TransferRate("p1", "d0", 100.0, 1))
    clock.now_s += 10
    assert recent.view().transfers[0] == TransferRate("p0", "d0", 0.0, 2)
    clock.now_s += 60
    assert recent.view().transfers == ()


def test_it_stays_small(recent: Recent, clock: Clock) -> None:
    for idx in range(MAX_VALUES + MAX_PAIRS):
        recent.observe("pdserve_inter_token_latency_seconds", 1.0 if idx < MAX_PAIRS else 2.0)
        recent.transferred(f"p{idx}", "d0", 1)
    view = recent.view()
    assert (view.itl_p50_s, len(view.transfers)) == (2.0, MAX_PAIRS)
    clock.now_s += 100
    recent.transferred("later", "d0", 1)
    assert [pair.prefill_worker_id for pair in recent.view().transfers] == ["later"]


@pytest.mark.parametrize(("values", "q", "expected"), [([], 0.5, None), ([1.0], 0.99, 1.0), ([1.0, 2.0], 0.5, 2.0)])
def test_quantile(values: list[float], q: float, expected: float | None) -> None:
    assert quantile(values, q) == expected
