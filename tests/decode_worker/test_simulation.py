"""One decode core under a random life: every stream is exact, every block comes back, nothing stands still.

First anything may happen; then the faults stop, and what is left must finish by itself.
"""

import random
from collections import Counter
from collections.abc import Callable

import pytest

from common.engine.contract.executor import StepFailed
from common.values.ids import RouterId
from common.values.messages import AttemptFailed, Granted, Refused
from common.values.request import SamplingParams, Work
from common.worker.events import Drained, DrainRequested, RouterLost
from tests.core_bench import ROUTER, attempt, draw_action, tokens
from tests.decode_worker.harness import Bench
from tests.decode_worker.oracle import Oracle
from tests.simkit.fake_engine import VOCAB_SIZE, expected_output

SEEDS = range(100)
NUM_ACTIONS = 250
SECOND = RouterId("second")


class Life:
    """Random work and faults for one Bench. What was done to an attempt decides what its streams must be."""

    def __init__(self, seed: int, *, has_drafts: bool = False) -> None:
        self.rng = rng = random.Random(seed)
        self.bench = Bench(
            num_blocks=rng.randint(6, 24),
            block_size=rng.choice([2, 4, 5]),
            budget=rng.choice([1, 3, 8, 64]),
            max_num_seqs=rng.choice([1, 2, 4, 8]),
            max_num_waiting=rng.choice([0, 3, 8]),
        )
        if has_drafts:
            self.bench.role.policy.speculation = Oracle(rng, share_right=rng.choice([0.3, 0.8, 1.0]))
        self.has_faults = rng.random() < 0.5  # without any, the pool is under more pressure
        self.works: dict[str, Work] = {}
        self.cancelled: dict[str, set[int]] = {}
        self.prefixes = [tokens(rng.randint(1, 16), first=100 * i) for i in range(3)]
        self.tries: Counter[str] = Counter()
        self.of_second: set[str] = set()

    def act(self) -> None:
        work: list[tuple[int, Callable[[], object]]] = [(20, self.reserve), (12, self.deliver), (40, self.step)]
        faults: list[tuple[int, Callable[[], object]]] = [
            (4, self.cancel),
            (4, self.cancel_one),
            (3, self.lose_transfer),
            (3, self.finish_writing),
            (2, self.fail_step),
            (2, self.not_finite),
            (1, self.lose_router),
            (1, lambda: self.bench.advance(self.rng.choice([0.1, 5.0, 31.0]))),
        ]
        draw_action(self.rng, work + faults if self.has_faults else work)

    def reserve(self) -> None:
        rng, name = self.rng, f"r{len(self.works)}"
        stops = tuple(rng.sample(range(VOCAB_SIZE), rng.choice([0, 0, 8])))
        max_tokens = rng.randint(1, 14)
        sampling = SamplingParams(
            seed=rng.randint(0, 3),
            max_tokens=max_tokens,
            min_tokens=rng.randint(0, max_tokens),
            frequency_penalty=rng.choice([0.0, 0.0, 0.5]),
            stop_token_ids=stops,
        )
        prompt = (*rng.choice(self.prefixes), *tokens(rng.randint(0, 9), first=rng.choice([500, 600])))
        choices = tuple(range(rng.choice([1, 1, 1, 2, 3])))
        work = Work(attempt(name), prompt, len(prompt), sampling, choices, priority=rng.choice([0, 0, 0, 1]))
        self.works[name] = work
        self.cancelled[name] = set()
        router_id = rng.choice([ROUTER, ROUTER, SECOND])
        if router_id == SECOND:
            self.of_second.add(name)
        self.bench.reserve(work, local=rng.choice([0, 0, 4, 100]), router_id=router_id)

    def deliver(self) -> None:
        if self.bench.receiver.expected:
            name = self.rng.choice(list(self.bench.receiver.expected)).request_id
            self.bench.deliver(self.works[name], self.tries[name])

    def lose_transfer(self) -> None:
        if self.bench.receiver.expected:
            name = self.rng.choice(list(self.bench.receiver.expected)).request_id
            self.bench.lose_transfer(name, self.tries[name])
            self.tries[name] += 1

    def finish_writing(self) -> None:
        self.bench.receiver.is_writing = self.rng.random() < 0.5
        for attempt_id in list(self.bench.receiver.withdrawn)[:1]:
            self.bench.finish_writing(attempt_id.request_id)

    def step(self) -> None:
        if self.bench.plan is not None:
            self.bench.step()

    def fail_step(self) -> None:
        if self.bench.plan is not None:
            plan, self.bench.plan = self.bench.plan, None
            self.bench.handle(StepFailed(plan.step_id, "injected"))

    def not_finite(self) -> None:
        if self.bench.plan is not None:
            self.bench.runner.nan_sequences = {self.rng.choice(self.bench.plan.sequences).sequence_id}
            self.bench.step()
            self.bench.runner.nan_sequences = set()

    def cancel(self) -> None:
        if self.works:
            name = self.rng.choice(list(self.works))
            self.cancelled[name].update(self.works[name].choices)
            self.bench.cancel(name)

    def cancel_one(self) -> None:
        if self.works:
            name = self.rng.choice(list(self.works)[-6:])
            choice = self.rng.choice(self.works[name].choices)
            self.cancelled[name].add(choice)
            self.bench.cancel(name, (choice,))

    def lose_router(self) -> None:
        self.bench.handle(RouterLost(SECOND))
        for name in self.of_second:
            self.cancelled[name].update(self.works[name].choices)

    def heal(self) -> None:
        """No more faults: every reservation is filled, every step succeeds."""
        bench = self.bench
        bench.receiver.is_writing = False
        for _ in range(5000):
            if bench.plan is not None:
                bench.step()
            elif bench.receiver.expected:
                self.deliver()
            elif bench.receiver.withdrawn:
                self.finish_writing()
            else:
                return
        raise AssertionError("the core does not come to rest")

    def check(self) -> None:
        assert self.bench.counts() == (0, 0)
        assert self.bench.core.next_deadline_s() is None
        for name, work in self.works.items():
            self.check_streams(name, work)
        assert self.bench.handle(DrainRequested(1.0)) == [Drained()]

    def check_streams(self, name: str, work: Work) -> None:
        answers = self.bench.messages(name)
        assert isinstance(answers[0], Granted | Refused)
        failures = [answer for answer in answers if isinstance(answer, AttemptFailed | Refused)]
        assert len(failures) <= 1
        for choice in work.choices:
            output, expected = self.bench.output(name, choice), expected_output(work, choice)
            assert output == expected[: len(output)], f"{name} choice {choice}"
            is_ended_early = failures or choice in self.cancelled[name]
            assert is_ended_early or output == expected, f"{name} choice {choice} is cut short"


@pytest.mark.parametrize("has_drafts", [False, True], ids=["plain", "drafts"])
@pytest.mark.parametrize("seed", SEEDS)
def test_random_life_is_exact_and_leaves_nothing(seed: int, has_drafts: bool) -> None:
    life = Life(seed, has_drafts=has_drafts)
    for _ in range(NUM_ACTIONS):
        life.act()
    life.heal()
    life.check()
