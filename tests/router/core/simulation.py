"""A router core among fake workers on a virtual clock, with seeded faults.

Streams keep their order; different streams overtake one another. A dead worker's last messages may still arrive
before its loss is noticed, and some come again much later.
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import replace

from common.values.errors import RequestCancelled
from common.values.messages import WorkerMessage, WorkerStats
from common.values.request import PromptLogprobs, SamplingParams
from router.core.core import RouterCore
from router.core.events import (
    ChoiceStopped,
    Deliver,
    DropWorker,
    EndRequested,
    LookupPrefix,
    PrefixFound,
    RequestSubmitted,
    RouterEffect,
    RouterEvent,
    SendToWorker,
    WorkerConnected,
    WorkerLost,
    WorkerMessageReceived,
)
from router.core.generation import Failed, Finished, GenerationEvent, GenerationRequest, Tokens
from router.core.router_limits import RouterLimits
from tests.router.core.kit import request, worker_info
from tests.router.fake_workers import STOP_TOKEN_ID, FakeDecode, FakePrefill, FakeWorker, reborn

STATS_INTERVAL_S = 0.5


class Simulation:
    """`fault_rate` is the chance of a fault at each step of a worker; `kill_every_s` the mean time between deaths."""

    def __init__(self, seed: int, *, fault_rate: float = 0.0, limits: RouterLimits | None = None) -> None:
        self.rng = random.Random(seed)
        self.fault_rate = fault_rate
        self.now_s = 1000.0
        self.core = RouterCore(limits or RouterLimits(max_retries=1000, retry_burst=10_000))
        self.specs: dict[str, GenerationRequest] = {}
        self.delivered: dict[str, list[GenerationEvent]] = {}
        self.stopped_choices: set[tuple[str, int]] = set()
        self.workers: dict[str, FakeWorker] = {}
        self.num_kills = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._num_scheduled = 0
        self._stream_s: dict[tuple[object, str], float] = {}
        for worker_id in ("p0", "p1", "d0", "d1"):
            kind = FakePrefill if worker_id.startswith("p") else FakeDecode
            self._join(kind(worker_info(worker_id), self))

    # ---- what happens -------------------------------------------------------------------------------

    def submit(self, spec: GenerationRequest) -> None:
        self.specs[spec.request_id] = spec
        self.delivered[spec.request_id] = []
        self.post(RequestSubmitted(spec))

    def submit_random(self, name: str) -> GenerationRequest:
        sampling = SamplingParams(seed=1, max_tokens=self.rng.randint(1, 12), stop_token_ids=(STOP_TOKEN_ID,))
        num_choices, priority = self.rng.choice((1, 1, 1, 3)), self.rng.randint(0, 2)
        spec = request(name, self.rng.randint(1, 80), num_choices=num_choices, priority=priority, deadline_s=600.0)
        spec = replace(spec, sampling=sampling, token_ids=tuple(self.rng.randrange(60) for _ in spec.token_ids))
        spec = replace(spec, num_prompt_logprobs=random.Random(name).choice((None, None, 0)))
        if spec.num_prompt_logprobs == 0 and random.Random(f"{name} alone").random() < 0.5:
            spec = replace(spec, sampling=replace(sampling, max_tokens=1), has_output=False)
        self.submit(spec)
        return spec

    def cancel(self, request_id: str) -> None:
        self.post(EndRequested(self.specs[request_id].request_id, RequestCancelled("client left")))

    def stop_choice(self, request_id: str, choice: int) -> None:
        self.stopped_choices.add((request_id, choice))
        self.post(ChoiceStopped(self.specs[request_id].request_id, choice))

    def kill(self, worker_id: str, *, back_after_s: float = 0.3) -> None:
        """The process dies; a new life of it joins later."""
        worker = self.workers.pop(worker_id, None)
        if worker is None:
            return
        self.num_kills += 1
        worker.die()
        self._to_router(worker, WorkerLost(worker.info.ref, "stream ended"))
        self.after(back_after_s, lambda: self._join(reborn(worker)))

    def freeze(self, worker_id: str) -> None:
        """The process stands still: nothing comes from it, and what it is sent does nothing."""
        worker = self.workers[worker_id]
        worker.die()

    def drain(self, worker_id: str, grace_s: float) -> None:
        """The worker refuses new work, hands running work back at the end of the grace, and is replaced."""
        worker = self.workers[worker_id]
        worker.is_draining = True
        self.reply(worker, worker.stats())

        def end() -> None:
            if worker.is_alive and isinstance(worker, FakeDecode):
                worker.end_drain()
            if worker.is_alive:
                self.kill(worker_id)

        self.after(grace_s, end)

    def run(self, seconds: float) -> None:
        """Let time pass."""
        end_s = self.now_s + seconds
        while True:
            deadline_s = self.core.next_deadline_s()
            event_s = self._heap[0][0] if self._heap else end_s
            next_s = min(event_s, end_s if deadline_s is None else deadline_s)
            if next_s >= end_s:
                break
            self.now_s = max(self.now_s, next_s)
            if deadline_s is not None and deadline_s <= event_s:
                self._perform(self.core.handle_deadline(self.now_s))
            else:
                heapq.heappop(self._heap)[2]()
        self.now_s = end_s

    # ---- World --------------------------------------------------------------------------------------

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        self._num_scheduled += 1
        heapq.heappush(self._heap, (self.now_s + delay_s, self._num_scheduled, action))

    def reply(self, worker: FakeWorker, message: WorkerMessage) -> None:
        if not worker.is_alive:
            return
        event = WorkerMessageReceived(worker.info.ref, message)
        self._to_router(worker, event)
        if self.rng.random() < self.fault_rate:
            self.after(self.rng.expovariate(1.0), lambda: self.post(event))  # once more, much later

    def decode_worker(self, worker_id: str, incarnation: str) -> FakeDecode | None:
        worker = self.workers.get(worker_id)
        return worker if isinstance(worker, FakeDecode) and worker.info.ref.incarnation == incarnation else None

    # ---- core ---------------------------------------------------------------------------------------

    def post(self, event: RouterEvent) -> None:
        self._perform(self.core.handle(event, self.now_s))

    def _perform(self, effects: list[RouterEffect]) -> None:
        self.core.check_invariants()
        for effect in effects:
            match effect:
                case Deliver(request_id, event):
                    events = self.delivered[request_id]
                    assert not events or not isinstance(events[-1], Finished | Failed), "answered twice"
                    events.append(event)
                case SendToWorker():
                    self._to_worker(effect)
                case LookupPrefix():
                    self._look_up(effect)
                case DropWorker(ref, _):
                    dropped = self.workers.get(ref.worker_id)
                    if dropped is not None and dropped.info.ref == ref:
                        del self.workers[ref.worker_id]
                        self.after(1.0, lambda worker=dropped: self._join(reborn(worker)))

    def _to_worker(self, effect: SendToWorker) -> None:
        worker = self.workers.get(effect.worker.worker_id)
        if worker is not None and worker.info.ref == effect.worker:
            receive = worker.receive
            deliver = lambda: receive(effect.message) if worker.is_alive else None  # noqa: E731
            self._in_order(("to", effect.worker), deliver)

    def _to_router(self, worker: FakeWorker, event: RouterEvent) -> None:
        self._in_order(("from", worker.info.ref), lambda: self.post(event))

    def _in_order(self, stream: tuple[str, object], action: Callable[[], None]) -> None:
        key = (stream[1], stream[0])
        at_s = max(self._stream_s.get(key, 0.0), self.now_s + self.rng.expovariate(1 / 0.002))
        self._stream_s[key] = at_s
        self.after(at_s - self.now_s, action)

    def _look_up(self, lookup: LookupPrefix) -> None:
        """Hints are often wrong, and sometimes do not come at all."""
        if self.rng.random() < self.fault_rate:
            return
        num_blocks = len(lookup.token_ids) // lookup.key.block_size
        found = tuple((ref, self.rng.randint(0, num_blocks)) for ref in lookup.workers)
        answer = PrefixFound(lookup.attempt_id, lookup.key, found)
        self.after(self.rng.expovariate(1 / 0.003), lambda: self.post(answer))

    def _join(self, worker: FakeWorker) -> None:
        worker_id = worker.info.ref.worker_id
        self.workers[worker_id] = worker
        self._to_router(worker, WorkerConnected(worker.info, f"{worker_id}:1"))
        self._report(worker)

    def _report(self, worker: FakeWorker) -> None:
        if worker.is_alive:
            stats: WorkerStats = worker.stats()
            self.reply(worker, stats)
            self.after(STATS_INTERVAL_S, lambda: self._report(worker))

    # ---- outcome ------------------------------------------------------------------------------------

    def output(self, request_id: str, choice: int) -> list[int]:
        """Delivered tokens; asserts that positions have no gap and no repeat."""
        events = [t for e in self.delivered[request_id] if isinstance(e, Tokens) for t in e.tokens]
        mine = [event for event in events if event.choice_idx == choice]
        assert [event.position for event in mine] == list(range(len(mine)))
        return [event.token.token_id for event in mine]

    def prompt_logprobs(self, request_id: str) -> list[float]:
        """Delivered ones; asserts that positions have no gap and no repeat, and that all come before the tokens."""
        events = self.delivered[request_id]
        scores = [event for event in events if isinstance(event, PromptLogprobs)]
        assert [event.start for event in scores] == [1, *(event.end for event in scores)][: len(scores)]
        kinds = [type(event) for event in events if isinstance(event, PromptLogprobs | Tokens)]
        assert PromptLogprobs not in kinds[len(scores) :]
        return [logprob for event in scores for logprob in event.logprobs]

    def last(self, request_id: str) -> GenerationEvent | None:
        return self.delivered[request_id][-1] if self.delivered[request_id] else None
