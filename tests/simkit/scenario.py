"""One seed = one run: a random cluster, random requests, random faults; then it heals and must make progress.

Nothing wrong, ever: no token that one process would not have given, no gap, no repeat, no second end, every invariant
of every core after every event. Then, healed: everything pending ends in bounded time, new requests succeed, and
every pool is whole.
"""

import hashlib
import random
from dataclasses import dataclass, field

from common.errors import NoReadyPair
from common.ids import RequestId
from common.messages import Role
from common.request import SamplingParams
from router.events import ChoiceStopped, EndRequested, RequestSubmitted
from router.generation import Finished, GenerationRequest
from tests.simkit.cluster import Answer, Shape, SimCluster
from tests.simkit.layered_engine import VOCAB_SIZE, expected_output

FAULTS_END_S = 6.0
DEADLINE_S = 25.0
NUM_CANARIES = 4
FAULT_KINDS = (
    *("kill", "freeze", "cut_stream", "break_session", "corrupt", "index_down", "slow_worker", "slow_wire"),
    *("fail_step", "drain"),
)


@dataclass(slots=True)
class Run:
    """What a run did. `digest` is equal for two runs of one seed, to the last event."""

    digest: str
    num_requests: int
    num_finished: int
    faults: list[str] = field(default_factory=list)
    num_preemptions: int = 0


class Scenario:
    """Builds and runs the simulation of one seed. `faults` limits the kinds; `fault_rate` is per second."""

    def __init__(self, seed: int, faults: tuple[str, ...] = FAULT_KINDS, fault_rate: float | None = None) -> None:
        self.rng = random.Random(seed)
        self.faults = faults
        # Swept, not fixed: some runs have none, some have several a second.
        self.fault_rate = self.rng.choice((0.0, 0.3, 1.0, 3.0)) if fault_rate is None else fault_rate
        self.cluster = SimCluster(self._shape(), self.rng)
        self.requests: dict[RequestId, GenerationRequest] = {}
        self.done_faults: list[str] = []
        self.prefixes = [self._tokens(self.rng.randint(4, 40)) for _ in range(3)]
        self.ended_by_client: set[RequestId] = set()

    def run(self) -> Run:
        """Raises AssertionError when anything is wrong."""
        cluster, time = self.cluster, self.cluster.time
        time.run_until(1.5)  # everybody is connected
        for _ in range(self.rng.randint(3, 10)):
            time.after(self.rng.uniform(0.0, FAULTS_END_S - 2.0), self._submit_random)
        self._plan_fault()
        time.run_until(FAULTS_END_S)
        self._heal()
        time.run_until(FAULTS_END_S + DEADLINE_S + 10.0, self._is_settled)
        self._check_answers()
        canaries = [self._submit(self._request(f"canary{idx}", max_tokens=5)) for idx in range(NUM_CANARIES)]
        time.run_until(time.now_s + 20.0, lambda: all(cluster.answers[key].end for key in canaries))
        for key in canaries:
            assert isinstance(cluster.answers[key].end, Finished), f"{key}: {cluster.answers[key].end}"
        self._check_answers()
        self._check_idle()
        text = "\n".join(cluster.log)
        finished = sum(isinstance(answer.end, Finished) for answer in cluster.answers.values())
        preemptions = sum(worker.stats().num_preemptions for worker in cluster.workers.values())
        return Run(
            hashlib.sha256(text.encode()).hexdigest(), len(self.requests), finished, self.done_faults, preemptions
        )

    # ---- requests -----------------------------------------------------------------------------------

    def _shape(self) -> Shape:
        rng = self.rng
        return Shape(
            num_prefill=rng.randint(1, 3),
            num_decode=rng.randint(1, 3),
            prefill_blocks=rng.choice((24, 40, 96)),
            decode_blocks=rng.choice((12, 20, 64)),
            prefill_block_size=rng.choice((4, 8)),
            decode_block_size=rng.choice((4, 8)),
            local_prefill_max_tokens=rng.choice((0, 0, 8, 1000)),
        )

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.rng.randrange(VOCAB_SIZE) for _ in range(count))

    def _request(self, name: str, max_tokens: int = 0) -> GenerationRequest:
        rng = self.rng
        prefix = rng.choice((*self.prefixes, ()))
        params = SamplingParams(
            seed=rng.randrange(1 << 30),
            max_tokens=max_tokens or rng.randint(1, 16),
            stop_token_ids=rng.choice(((), (7,))),
        )
        prompt = (*prefix, *self._tokens(rng.randint(1, 12)))
        choices = rng.choice((1, 1, 1, 2, 3))
        # What can fit in the smallest pool: a prompt and its output in one sequence.
        shape = self.cluster.shape
        room = min(shape.decode_blocks * shape.decode_block_size, shape.prefill_blocks * shape.prefill_block_size)
        assert len(prompt) + params.max_tokens <= 128
        prompt = prompt[: room - params.max_tokens - 8]
        return GenerationRequest(
            RequestId(name), prompt, params, choices, priority=rng.choice((0, 0, 1)), deadline_s=DEADLINE_S
        )

    def _submit_random(self) -> None:
        key = self._submit(self._request(f"r{len(self.requests)}"))
        time = self.cluster.time
        if self.rng.random() < 0.2:
            self.ended_by_client.add(key)
            time.after(self.rng.uniform(0.0, 0.5), lambda: self._leave(key))
        elif self.rng.random() < 0.1:
            self.ended_by_client.add(key)
            time.after(self.rng.uniform(0.05, 0.5), lambda: self.cluster.router.post(ChoiceStopped(key, 0)))

    def _submit(self, request: GenerationRequest) -> RequestId:
        self.requests[request.request_id] = request
        self.cluster.answers[request.request_id] = Answer()
        self.cluster.note(f"submit {request.request_id}")
        self.cluster.router.post(RequestSubmitted(request))
        return request.request_id

    def _leave(self, key: RequestId) -> None:
        self.cluster.router.post(EndRequested(key, NoReadyPair("client gone")))

    # ---- faults -------------------------------------------------------------------------------------

    def _plan_fault(self) -> None:
        if self.fault_rate > 0:
            self.cluster.time.after(self.rng.expovariate(self.fault_rate), self._fault)

    def _fault(self) -> None:
        if self.cluster.time.now_s >= FAULTS_END_S:
            return
        kind = self.rng.choice(self.faults)
        name = self.rng.choice(list(self.cluster.workers))
        self.cluster.note(f"fault {kind} {name}")
        self.done_faults.append(kind)
        getattr(self, f"_fault_{kind}")(name)
        self._plan_fault()

    def _fault_kill(self, name: str) -> None:
        worker = self.cluster.workers[name]
        if worker.is_alive:
            self.cluster.kill(name)
            self.cluster.time.after(self.rng.uniform(0.1, 3.0), lambda: self._restart(name, worker.role))

    def _restart(self, name: str, role: Role) -> None:
        if not self.cluster.workers[name].is_alive:
            self.cluster.start_worker(name, role)

    def _fault_freeze(self, name: str) -> None:
        worker = self.cluster.workers[name]
        worker.freeze()
        self.cluster.time.after(self.rng.uniform(0.05, 5.0), worker.thaw)

    def _fault_cut_stream(self, name: str) -> None:
        self.cluster.disconnect(self.cluster.workers[name], "stream cut")

    def _fault_break_session(self, _: str) -> None:
        for session in self.cluster.sessions.open_sessions()[:1]:
            session.break_("session cut")

    def _fault_corrupt(self, _: str) -> None:
        for session in self.cluster.sessions.open_sessions():
            session.corruptions = 1

    def _fault_index_down(self, _: str) -> None:
        self.cluster.is_index_up = False
        self.cluster.time.after(self.rng.uniform(0.1, 2.0), self._index_up)

    def _index_up(self) -> None:
        self.cluster.is_index_up = True

    def _fault_slow_worker(self, name: str) -> None:
        self.cluster.workers[name].slowness = 10.0

    def _fault_slow_wire(self, _: str) -> None:
        self.cluster.wire.slowness = 20.0

    def _fault_fail_step(self, name: str) -> None:
        self.cluster.workers[name].failing_steps = 1

    def _fault_drain(self, name: str) -> None:
        worker = self.cluster.workers[name]
        if worker.is_alive and not worker.is_frozen:
            self.cluster.drain(name, 1.0)
            self.cluster.time.after(2.0, lambda: self._replace(name))

    def _replace(self, name: str) -> None:
        if self.cluster.workers[name].is_alive:
            self.cluster.kill(name)
        self._restart(name, self.cluster.workers[name].role)

    def _heal(self) -> None:
        self.cluster.note("heal")
        self.cluster.is_index_up = True
        self.cluster.wire.slowness = 1.0
        for name, worker in list(self.cluster.workers.items()):
            worker.slowness, worker.failing_steps = 1.0, 0
            if worker.is_frozen:
                worker.thaw()
            self._restart(name, worker.role)
        for session in self.cluster.sessions.open_sessions():
            session.corruptions = 0

    # ---- judging ------------------------------------------------------------------------------------

    def _is_settled(self) -> bool:
        return self.cluster.time.now_s > FAULTS_END_S + 4.0 and all(a.end for a in self.cluster.answers.values())

    def _check_answers(self) -> None:
        for key, answer in self.cluster.answers.items():
            request = self.requests[key]
            assert answer.end is not None, f"{key} has no end"
            for choice_idx, output in answer.tokens.items():
                expected = expected_output(request.token_ids, request.sampling, choice_idx)
                assert output == expected[: len(output)], f"{key}/{choice_idx}: {output} instead of {expected}"
                if isinstance(answer.end, Finished) and key not in self.ended_by_client:
                    assert output == expected, f"{key}/{choice_idx} ends early: {output} of {expected}"
            if isinstance(answer.end, Finished) and key not in self.ended_by_client:
                assert len(answer.tokens) == request.num_choices
            if not self.done_faults and key not in self.ended_by_client:
                assert isinstance(answer.end, Finished), f"{key} failed without any fault: {answer.end}"

    def _check_idle(self) -> None:
        time = self.cluster.time
        time.run_until(time.now_s + 20.0)
        assert self.cluster.router.core.request_ids == ()  # type: ignore[attr-defined]
        for worker in self.cluster.workers.values():
            stats = worker.pool.stats()
            assert (stats.used, stats.held) == (0, 0), f"{worker.ref} leaks: {stats}"
            assert stats.cached + stats.free == stats.total
