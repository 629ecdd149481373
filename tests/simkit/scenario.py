"""One seed = one run: a random cluster, random requests, random faults; then it heals and must make progress.

Nothing wrong, ever: no token that one process would not have given, no gap, no repeat, no second end, every invariant
of every core after every event. Then, healed: everything pending ends in bounded time, new requests succeed, and
every pool is whole.
"""

import hashlib
import random
from dataclasses import dataclass, field

from common.values.errors import NoReadyPair, PeerError
from common.values.ids import RequestId
from router.core.events import ChoiceStopped, EndRequested, RequestSubmitted
from router.core.generation import Failed, Finished, GenerationRequest
from tests.simkit.cluster import Answer, SimCluster
from tests.simkit.faults import Faults
from tests.simkit.layered_engine import expected_logprobs, expected_output
from tests.simkit.plan import (
    DEADLINE_S,
    FAULTS_END_S,
    FAULTS_START_S,
    REDIS_KINDS,
    Plan,
    PlannedRequest,
    canary,
)

NUM_CANARIES = 4
CANARY_S, IDLE_S = 20.0, 20.0


@dataclass(slots=True)
class Run:
    """What a run did. `digest` is equal for two runs of one plan, to the last event."""

    digest: str
    num_requests: int
    num_finished: int
    faults: list[str] = field(default_factory=list)
    num_preemptions: int = 0


class Scenario:
    """Runs one plan. `cluster.log` is what happened."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.cluster = SimCluster(plan.shape, random.Random(plan.seed))
        self.faults = Faults(self.cluster)
        self.requests: dict[RequestId, GenerationRequest] = {}
        self.ended_by_client: set[RequestId] = set()

    def run(self) -> Run:
        """Raises AssertionError when anything is wrong."""
        cluster, time = self.cluster, self.cluster.time
        time.run_until(FAULTS_START_S)  # everybody is connected
        for request in self.plan.requests:
            time.after(request.at_s - time.now_s, lambda request=request: self._submit(request))  # type: ignore[misc]
        for fault in self.plan.faults:
            time.after(fault.at_s - time.now_s, lambda fault=fault: self.faults.inject(fault))  # type: ignore[misc]
        time.run_until(FAULTS_END_S)
        self.faults.heal()
        time.run_until(FAULTS_END_S + DEADLINE_S + 10.0, self._is_settled)
        self._check_answers()
        self._check_canaries()
        self._check_idle()
        finished = sum(isinstance(answer.end, Finished) for answer in cluster.answers.values())
        preemptions = sum(worker.stats().num_preemptions for worker in cluster.workers.values())
        digest = hashlib.sha256("\n".join(cluster.log).encode()).hexdigest()
        return Run(digest, len(self.requests), finished, self.faults.done, preemptions)

    # ---- requests -----------------------------------------------------------------------------------

    def _submit(self, request: PlannedRequest) -> None:
        time, key = self.cluster.time, request.spec.request_id
        self._send(request.spec)
        if request.leaves_after_s is not None:
            self.ended_by_client.add(key)
            end = EndRequested(key, NoReadyPair("client gone"))
            time.after(request.leaves_after_s, lambda: self.cluster.router.post(end))
        if request.stops_after_s is not None:
            self.ended_by_client.add(key)
            time.after(request.stops_after_s, lambda: self.cluster.router.post(ChoiceStopped(key, 0)))

    def _send(self, spec: GenerationRequest) -> None:
        """A client whose router is dead is refused at once."""
        cluster = self.cluster
        self.requests[spec.request_id] = spec
        answer = cluster.answers[spec.request_id] = Answer()
        cluster.note(f"submit {spec.request_id}")
        if cluster.router.is_alive:
            cluster.router.post(RequestSubmitted(spec))
        else:
            answer.end = Failed(PeerError("connection refused"))

    # ---- judging ------------------------------------------------------------------------------------

    def _is_settled(self) -> bool:
        return self.cluster.time.now_s > FAULTS_END_S + 4.0 and all(a.end for a in self.cluster.answers.values())

    def _check_answers(self) -> None:
        for key, answer in self.cluster.answers.items():
            assert answer.end is not None, f"{key} has no end"
            self._check_tokens(key, answer)
            if key in self.ended_by_client:
                continue
            if isinstance(answer.end, Finished):
                assert len(answer.tokens) == self.requests[key].num_choices
                self._check_account(key, answer)
            self._check_end(key, answer)

    def _check_end(self, key: RequestId, answer: Answer) -> None:
        """Whatever state Redis is in, no request fails, and none has to be placed again."""
        if set(self.faults.done) - set(REDIS_KINDS):
            return
        cause = f"with nothing but {self.faults.done}" if self.faults.done else "without any fault"
        assert isinstance(answer.end, Finished), f"{key} failed {cause}: {answer.end}"
        if key not in self.ended_by_client:
            assert answer.end.timings.num_retries == 0, f"{key} was placed again {cause}"

    def _check_account(self, key: RequestId, answer: Answer) -> None:
        """Without faults every prompt token was cached or computed in a step that is reported, whatever came first."""
        end, accepted = answer.end, answer.accepted
        if self.faults.done or not isinstance(end, Finished) or accepted is None:
            return
        if accepted.prefill_worker_id != accepted.decode_worker_id:
            num_prefilled = sum(num_tokens for _, _, num_tokens in end.timings.prefill_chunks)
            assert num_prefilled + end.num_cached_tokens == end.num_prompt_tokens, f"{key}: {end} does not add up"

    def _check_tokens(self, key: RequestId, answer: Answer) -> None:
        """What was delivered is what one process would have given; all of it when the answer is a success."""
        request = self.requests[key]
        if request.num_prompt_logprobs is not None:
            scores = expected_logprobs(request.token_ids)
            is_success = isinstance(answer.end, Finished) and key not in self.ended_by_client
            is_whole = is_success or bool(answer.tokens)
            assert answer.prompt_logprobs == (scores if is_whole else scores[: len(answer.prompt_logprobs)]), key
        for choice_idx, output in answer.tokens.items():
            expected = expected_output(request.token_ids, request.sampling, choice_idx)
            assert output == expected[: len(output)], f"{key}/{choice_idx}: {output} instead of {expected}"
            if isinstance(answer.end, Finished) and key not in self.ended_by_client:
                assert output == expected, f"{key}/{choice_idx} ends early: {output} of {expected}"

    def _check_canaries(self) -> None:
        cluster = self.cluster
        canaries = [canary(self.plan.seed, idx, self.plan.shape) for idx in range(NUM_CANARIES)]
        for spec in canaries:
            self._send(spec)
        answers = [cluster.answers[spec.request_id] for spec in canaries]
        cluster.time.run_until(cluster.time.now_s + CANARY_S, lambda: all(answer.end for answer in answers))
        for spec, answer in zip(canaries, answers, strict=True):
            assert isinstance(answer.end, Finished), f"{spec.request_id}: {answer.end}"
        self._check_answers()

    def _check_idle(self) -> None:
        time = self.cluster.time
        time.run_until(time.now_s + IDLE_S)
        assert self.cluster.router.core.request_ids == ()  # type: ignore[attr-defined]
        for worker in self.cluster.workers.values():
            stats = worker.pool.stats()
            assert (stats.used, stats.held) == (0, 0), f"{worker.ref} leaks: {stats}"
            assert stats.cached + stats.free == stats.total
