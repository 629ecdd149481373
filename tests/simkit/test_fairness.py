"""A tenant's flood in a simulated cluster: another's short prompt is hardly later, and the flood is hardly slower."""

import random

import pytest

from common.values.ids import RequestId
from common.values.request import SamplingParams
from router.core.events import RequestSubmitted
from router.core.generation import Finished, GenerationRequest
from tests.simkit.cluster import Answer, Shape, SimCluster
from tests.simkit.layered_engine import VOCAB_SIZE

NUM_FLOOD, NUM_OTHER = 150, 6
MAX_SLOWER, MIN_THROUGHPUT = 5.0, 0.6
DONE_S = 600.0


class Clients:
    """Sends requests of tenants and keeps what came of them."""

    def __init__(self, seed: int, local_max: int) -> None:
        shape = Shape(num_prefill=1, num_decode=1, local_prefill_max_tokens=local_max, max_num_queued=256)
        self.rng = random.Random(seed)
        self.cluster = SimCluster(shape, random.Random(seed))
        self.sent_s: dict[str, float] = {}
        self.cluster.time.run_until(2.0)

    def send(self, name: str, tenant: str, num_tokens: int, max_tokens: int) -> None:
        prompt = tuple(self.rng.randrange(VOCAB_SIZE) for _ in range(num_tokens))
        params = SamplingParams(seed=self.rng.randrange(1 << 30), max_tokens=max_tokens)
        spec = GenerationRequest(RequestId(name), prompt, params, deadline_s=DONE_S, tenant=tenant)
        self.cluster.answers[spec.request_id] = Answer()
        self.sent_s[name] = self.cluster.time.now_s
        self.cluster.router.post(RequestSubmitted(spec))

    def send_flood(self) -> None:
        for idx in range(NUM_FLOOD):
            self.send(f"flood{idx}", "a", self.rng.randint(4, 40), 8)

    def send_others(self) -> None:
        for idx in range(NUM_OTHER):
            self.cluster.time.after(0.15 * (idx + 1), lambda idx=idx: self.send(f"other{idx}", "b", 8, 4))  # type: ignore[misc]

    def run(self) -> None:
        answers = self.cluster.answers
        self.cluster.time.run_until(
            DONE_S, lambda: self.cluster.time.now_s > 4.0 and all(a.end for a in answers.values())
        )
        assert all(isinstance(answer.end, Finished) for answer in answers.values())

    def first_token_s(self) -> float:
        """How long the other tenant waits, on average: a single one depends on when the next block is freed."""
        waits = [
            answer.first_s - self.sent_s[name]
            for name, answer in self.cluster.answers.items()
            if name.startswith("other") and answer.first_s is not None
        ]
        assert len(waits) == NUM_OTHER
        return sum(waits) / NUM_OTHER

    def flood_s(self) -> float:
        ends = [answer.ended_s for name, answer in self.cluster.answers.items() if name.startswith("flood")]
        return max(ends) - self.sent_s["flood0"]


def run(seed: int, local_max: int, *, flood: bool, others: bool) -> Clients:
    clients = Clients(seed, local_max)
    if flood:
        clients.send_flood()
    if others:
        clients.send_others()
    clients.run()
    return clients


@pytest.mark.parametrize("local_max", [0, 12], ids=["prefilled apart", "prefilled by the decode worker"])
@pytest.mark.parametrize("seed", range(2))
def test_a_flood_of_one_tenant_is_hardly_noticed_by_another(seed: int, local_max: int) -> None:
    """1. the other alone; 2. the flood alone; 3. both."""
    unloaded_s = run(seed, local_max, flood=False, others=True).first_token_s()
    alone_s = run(seed, local_max, flood=True, others=False).flood_s()
    shared = run(seed, local_max, flood=True, others=True)
    print(
        f"first token {unloaded_s:.3f} -> {shared.first_token_s():.3f} s, flood {alone_s:.2f} -> {shared.flood_s():.2f}"
    )
    assert shared.flood_s() > 1.0, "the flood is over before the other has come"
    assert shared.first_token_s() <= MAX_SLOWER * unloaded_s
    assert shared.flood_s() <= alone_s / MIN_THROUGHPUT
