"""Whatever dies, fails, repeats or overtakes: every request is answered once, with exactly the right tokens."""

import pytest

from router.core.generation import Failed, Finished, Tokens
from router.core.router_limits import RouterLimits
from tests.router.core.simulation import Simulation
from tests.router.fake_workers import expected_output, logprob_at

NUM_REQUESTS = 30


def check_outcome(sim: Simulation, cancelled: set[str]) -> None:
    for request_id, spec in sim.specs.items():
        last = sim.last(request_id)
        if request_id in cancelled:
            assert isinstance(last, Finished | Failed)
        else:
            assert isinstance(last, Finished), f"{request_id}: {last}"
        if spec.num_prompt_logprobs is not None:
            scores = [logprob_at(spec.token_ids, position) for position in range(1, len(spec.token_ids))]
            has_tokens = any(isinstance(event, Tokens) for event in sim.delivered[request_id])
            found = sim.prompt_logprobs(request_id)
            assert found == (scores if has_tokens else scores[: len(found)])
        for choice in range(spec.num_choices):
            output, expected = sim.output(request_id, choice), expected_output(spec, choice)
            if isinstance(last, Failed) or (request_id, choice) in sim.stopped_choices:
                assert output == expected[: len(output)]
            else:
                assert output == expected
        if isinstance(last, Finished):
            timings = last.timings
            assert last.num_prompt_tokens == len(spec.token_ids)
            parts = (timings.route_s, timings.prefill_queue_s, timings.prefill_s, timings.kv_exposed_s)
            parts += (timings.decode_queue_s, timings.decode_s)
            assert all(part >= 0 for part in parts)
            assert sum(parts) == pytest.approx(timings.wall_s)


def check_nothing_left(sim: Simulation) -> None:
    assert sim.core.request_ids == ()
    assert sim.core.num_queued == 0
    assert all(not worker.shares for worker in sim.core.workers)
    assert {worker_id: worker.held for worker_id, worker in sim.workers.items() if worker.held} == {}


def run_faulty(seed: int, fault_rate: float, local_max: int) -> tuple[Simulation, set[str]]:
    limits = RouterLimits(local_prefill_max_tokens=local_max, max_retries=1000, retry_burst=10_000.0, pair_grace_s=60.0)
    sim = Simulation(seed, fault_rate=fault_rate, limits=limits)
    sim.run(0.2)
    cancelled: set[str] = set()
    for idx in range(NUM_REQUESTS):
        spec = sim.submit_random(f"r{idx}")
        sim.run(sim.rng.expovariate(1 / 0.03))
        roll = sim.rng.random()
        worker_id = sim.rng.choice(("p0", "p1", "d0", "d1"))
        if roll < 0.15:
            sim.kill(worker_id)
        elif roll < 0.2 and worker_id in sim.workers:
            sim.freeze(worker_id)
        elif roll < 0.25 and worker_id in sim.workers:
            sim.drain(worker_id, grace_s=0.1)
        elif roll < 0.35:
            name = f"r{sim.rng.randint(0, idx)}"
            cancelled.add(name)
            sim.cancel(name)
        elif roll < 0.45:
            sim.stop_choice(spec.request_id, sim.rng.randrange(spec.num_choices))
    sim.fault_rate = 0.0  # heal
    return sim, cancelled


@pytest.mark.parametrize("seed", range(150))
def test_every_request_is_answered_once_with_the_right_tokens(seed: int) -> None:
    sim, cancelled = run_faulty(seed, fault_rate=(0.0, 0.02, 0.1)[seed % 3], local_max=(0, 16)[seed % 2])
    sim.run(60.0)
    check_outcome(sim, cancelled)
    check_nothing_left(sim)
