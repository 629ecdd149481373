"""Every metric of the router about requests, against a ledger that the client keeps of a simulated run with faults."""

from collections import Counter, defaultdict
from typing import Any

import pytest

from router.core.events import Deliver, RouterEffect
from router.core.generation import Accepted, Failed, Finished, GenerationEvent, GenerationRequest, Tokens
from router.core.router_limits import RouterLimits
from router.observe.request_metrics import RequestMetrics
from tests.router.core.simulation import Simulation

NUM_REQUESTS = 40
PHASES = ("route", "prefill_queue", "prefill", "kv_exposed", "decode_queue", "decode")
Key = tuple[Any, ...]  # metric, label values


class Books:
    """What was counted, and every value that was observed."""

    def __init__(self) -> None:
        self.counts: Counter[Key] = Counter()
        self.values: defaultdict[Key, list[float]] = defaultdict(list)

    def inc(self, name: str, amount: float = 1, **labels: str) -> None:
        self.counts[name, *labels.values()] += int(amount)

    def observe(self, name: str, value: float, **labels: str) -> None:
        self.values[name, *labels.values()].append(value)

    def set(self, name: str, value: float, **labels: str) -> None:
        raise AssertionError(f"{name} is no gauge")


class CountedSimulation(Simulation):
    """Feeds the metrics what the service feeds them; `received` is what each client got, and when."""

    def __init__(self, seed: int) -> None:
        self.books = Books()
        self.received: dict[str, list[tuple[float, GenerationEvent | None]]] = {}
        self._metrics = RequestMetrics(self.books)
        limits = RouterLimits(local_prefill_max_tokens=16, max_retries=1000, retry_burst=10_000.0, max_num_queued=6)
        super().__init__(seed, fault_rate=0.05, limits=limits)

    def submit(self, spec: GenerationRequest) -> None:
        self.received[spec.request_id] = [(self.now_s, None)]
        self._metrics.submitted(spec, self.now_s)
        super().submit(spec)

    def _perform(self, effects: list[RouterEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Deliver):
                self.received[effect.request_id].append((self.now_s, effect.event))
                self._metrics.delivered(effect.request_id, effect.event, self.now_s)
        super()._perform(effects)


def ledger(received: list[tuple[float, GenerationEvent | None]], has_output: bool, books: Books) -> None:
    """What one client knows, by its own reckoning; who asked for its prompt alone was given no token."""
    before_s, has_tokens = received[0][0], False
    for now_s, event in received[1:]:
        match event:
            case Accepted():
                books.inc("pdserve_prefills", role=(event.prefill_worker_id.startswith("d") and "decode") or "prefill")
            case Tokens(tokens):
                ends = [token.finish_reason for token in tokens if token.finish_reason]
                books.counts.update(("pdserve_request_finished", reason) for reason in ends)
                if not has_output:
                    continue
                kind = "pdserve_inter_token_latency_seconds" if has_tokens else "pdserve_time_to_first_token_seconds"
                books.observe(kind, now_s - before_s)
                books.inc("pdserve_generation_tokens", len(tokens))
                before_s, has_tokens = now_s, True
            case Failed(error):
                books.inc("pdserve_requests", status="failed", error_type=error.code)
                if error.code == "queue_full":
                    books.inc("pdserve_admission_rejections", reason=error.code)
            case Finished():
                assert has_output or event.num_completion_tokens == 0
                finished(event, books)


def finished(event: Finished, books: Books) -> None:
    timings = event.timings
    books.inc("pdserve_requests", status="finished", error_type="")
    books.inc("pdserve_prompt_tokens", event.num_prompt_tokens)
    books.inc("pdserve_prompt_tokens_cached", event.num_cached_tokens)
    books.observe("pdserve_request_duration_seconds", timings.wall_s)
    for phase in PHASES:
        books.observe("pdserve_phase_duration_seconds", getattr(timings, f"{phase}_s"), phase=phase)
    if event.num_completion_tokens > 1:
        per_token_s = (timings.wall_s - timings.time_to_first_token_s) / (event.num_completion_tokens - 1)
        books.observe("pdserve_time_per_output_token_seconds", per_token_s)
    if timings.kv_bytes:
        books.observe("pdserve_kv_transfer_seconds", timings.kv_transfer_s)
        books.observe("pdserve_kv_transfer_exposed_seconds", timings.kv_exposed_s)
        books.observe("pdserve_kv_handover_seconds", timings.kv_exposed_s + timings.decode_queue_s)
        books.observe("pdserve_kv_transfer_bytes", timings.kv_bytes)


@pytest.mark.parametrize("seed", range(6))
def test_every_metric_of_requests_is_what_the_clients_can_reckon(seed: int) -> None:
    """1. requests come faster than they are taken, workers die, messages repeat; 2. each client adds its own up."""
    sim = CountedSimulation(seed)
    sim.run(0.2)
    for idx in range(NUM_REQUESTS):
        sim.submit_random(f"r{idx}")
        sim.run(sim.rng.expovariate(1 / 0.005))
        if idx % 7 == 3:
            sim.kill(sim.rng.choice(("p0", "p1", "d0", "d1")))
        if idx % 9 == 5:
            sim.cancel(f"r{sim.rng.randint(0, idx)}")
    sim.fault_rate = 0.0
    sim.run(60.0)
    expected = Books()
    for request_id, received in sim.received.items():
        assert isinstance(received[-1][1], Finished | Failed), "a request without an end"
        ledger(received, sim.specs[request_id].has_output, expected)
    assert not all(spec.has_output for spec in sim.specs.values())
    assert sim.books.counts == expected.counts
    assert {key: sorted(values) for key, values in sim.books.values.items()} == {
        key: sorted(values) for key, values in expected.values.items()
    }
    assert expected.counts["pdserve_requests", "finished", ""] > NUM_REQUESTS // 3
