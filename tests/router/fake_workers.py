"""Workers as far as a router can tell, without a model: they answer after random times, hold what they were given
until it ends, and can be killed. The next token is a function of the tokens so far and the choice, so a replay
that starts from the wrong tokens shows.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from common.values.ids import AttemptId
from common.values.messages import (
    AttemptFailed,
    AttemptTokens,
    Cancel,
    FirstTokens,
    Granted,
    HandoffReport,
    Prefill,
    PromptScored,
    Refused,
    Reserve,
    RouterMessage,
    TokenBatch,
    TransferFailed,
    WorkerInfo,
    WorkerMessage,
    WorkerState,
    WorkerStats,
)
from common.values.request import PromptLogprobs, SampledToken, TokenEvent, Work
from router.core.generation import GenerationRequest

STOP_TOKEN_ID = 5


def next_token_id(token_ids: tuple[int, ...], choice: int) -> int:
    return (len(token_ids) * 31 + token_ids[-1] * 7 + sum(token_ids[-3:]) + choice * 13) % 61


def expected_output(spec: GenerationRequest, choice: int) -> list[int]:
    """What an undisturbed run gives."""
    token_ids, output = spec.token_ids, []
    while not output or spec.sampling.finish_reason(output[-1], len(output)) is None:
        output.append(next_token_id(token_ids, choice))
        token_ids = (*token_ids, output[-1])
    return output


def sample(work: Work, token_ids: tuple[int, ...], choice: int) -> TokenEvent:
    token_id = next_token_id(token_ids, choice)
    position = len(token_ids) - work.num_prompt_tokens
    return TokenEvent(choice, position, SampledToken(token_id), work.sampling.finish_reason(token_id, position + 1))


def logprob_at(token_ids: tuple[int, ...], position: int) -> float:
    return -(position * 61 + sum(token_ids[: position + 1]) % 61) / 8


def scored(work: Work, prefill_try: int | None = None) -> list[PromptScored]:
    """The logprobs of a prompt, in parts, if they are asked for."""
    if work.num_prompt_logprobs is None:
        return []
    parts = [range(start, min(start + 16, work.num_prompt_tokens)) for start in range(1, work.num_prompt_tokens, 16)]
    columns = [tuple(logprob_at(work.token_ids, position) for position in part) for part in parts]
    return [
        PromptScored(work.attempt_id, PromptLogprobs(part.start, logprobs, (1,) * len(part)), prefill_try)
        for part, logprobs in zip(parts, columns, strict=True)
    ]


class World(Protocol):
    """What a fake worker needs of the simulation."""

    rng: random.Random
    fault_rate: float

    def after(self, delay_s: float, action: Callable[[], None]) -> None: ...

    def reply(self, worker: "FakeWorker", message: WorkerMessage) -> None: ...

    def decode_worker(self, worker_id: str, incarnation: str) -> "FakeDecode | None": ...


@dataclass
class FakeWorker:
    """One life of a worker."""

    info: WorkerInfo
    world: World
    is_alive: bool = True
    is_draining: bool = False

    def receive(self, message: RouterMessage) -> None:
        raise NotImplementedError

    def die(self) -> None:
        self.is_alive = False

    @property
    def held(self) -> list[AttemptId]:
        raise NotImplementedError

    def stats(self) -> WorkerStats:
        free = max(0, self.info.num_blocks - 4 * len(self.held))
        state = WorkerState.DRAINING if self.is_draining else WorkerState.READY
        return WorkerStats(state, len(self.held), 0, 0, self.info.num_blocks - free, 0, free, 0, 1000.0)

    def _later(self, mean_s: float, action: Callable[[], None]) -> None:
        self.world.after(self.world.rng.expovariate(1 / mean_s), lambda: action() if self.is_alive else None)

    def _has_fault(self) -> bool:
        return self.world.rng.random() < self.world.fault_rate


@dataclass
class _Sequence:
    """An attempt on a decode worker."""

    work: Work
    token_ids: dict[int, tuple[int, ...]]  # of the choices still generating
    is_waiting: bool = True  # for KV


@dataclass
class FakeDecode(FakeWorker):
    sequences: dict[AttemptId, _Sequence] = field(default_factory=dict)

    @property
    def held(self) -> list[AttemptId]:
        return list(self.sequences)

    def receive(self, message: RouterMessage) -> None:
        match message:
            case Reserve(work, local_max):
                self._reserve(work, local_max)
            case Cancel(attempt_id, choices):
                self._cancel(attempt_id, choices)

    def _reserve(self, work: Work, local_max: int) -> None:
        attempt_id = work.attempt_id
        if self.is_draining or self._has_fault():
            self._later(0.005, lambda: self.world.reply(self, Refused(attempt_id, "no room", is_retryable=True)))
            return
        num_missing = min(len(work.token_ids), 16 * self.world.rng.randint(1, 4))
        is_local = num_missing <= local_max
        self.sequences[attempt_id] = _Sequence(work, dict.fromkeys(work.choices, work.token_ids))
        granted = Granted(attempt_id, len(work.token_ids) - num_missing, is_local)
        self._later(0.005, lambda: self._grant(granted))

    def _grant(self, granted: Granted) -> None:
        attempt_id = granted.attempt_id
        if attempt_id not in self.sequences:
            return
        self.world.reply(self, granted)
        if granted.is_local:
            report = HandoffReport(attempt_id, 0, 0, 0.0, 0.0, 0.001, 16, is_local=True, local_prefill_s=0.002)
            self._later(0.02, lambda: self._start(attempt_id, report))

    def _cancel(self, attempt_id: AttemptId, choices: tuple[int, ...]) -> None:
        sequence = self.sequences.get(attempt_id)
        if sequence is None:
            return
        for choice in choices or tuple(sequence.token_ids):
            sequence.token_ids.pop(choice, None)
        if not sequence.token_ids:
            del self.sequences[attempt_id]

    def transfer_ended(self, attempt_id: AttemptId, prefill_try: int, *, is_done: bool) -> None:
        """A prefill worker brought all KV, or will not."""
        sequence = self.sequences.get(attempt_id)
        if not self.is_alive or sequence is None or not sequence.is_waiting:
            return
        if is_done:
            self._start(attempt_id, HandoffReport(attempt_id, 4096, 4, 0.01, 0.002, 0.001, 0, is_local=False))
        else:
            self.world.reply(self, TransferFailed(attempt_id, prefill_try, "link lost"))

    def _start(self, attempt_id: AttemptId, report: HandoffReport) -> None:
        sequence = self.sequences.get(attempt_id)
        if sequence is None or not sequence.is_waiting:
            return
        sequence.is_waiting = False
        for message in scored(sequence.work) if report.is_local else ():
            self.world.reply(self, message)
        self.world.reply(self, report)
        self._later(0.01, lambda: self._step(attempt_id))

    def _step(self, attempt_id: AttemptId) -> None:
        sequence = self.sequences.get(attempt_id)
        if sequence is None:
            return
        if self._has_fault():
            del self.sequences[attempt_id]
            self.world.reply(self, AttemptFailed(attempt_id, "step failed", is_retryable=True))
            return
        events = [sample(sequence.work, ids, choice) for choice, ids in sequence.token_ids.items()]
        sequence.token_ids = {
            event.choice_idx: (*sequence.token_ids[event.choice_idx], event.token.token_id)
            for event in events
            if event.finish_reason is None
        }
        self.world.reply(self, TokenBatch((AttemptTokens(attempt_id, tuple(events)),)))
        if sequence.token_ids:
            self._later(0.01, lambda: self._step(attempt_id))
        else:
            del self.sequences[attempt_id]

    def end_drain(self) -> None:
        """The grace is over: what still runs has to go elsewhere."""
        for attempt_id in self.held:
            del self.sequences[attempt_id]
            self.world.reply(self, AttemptFailed(attempt_id, "drained", is_retryable=True))


@dataclass
class FakePrefill(FakeWorker):
    jobs: dict[AttemptId, Prefill] = field(default_factory=dict)

    @property
    def held(self) -> list[AttemptId]:
        return list(self.jobs)

    def receive(self, message: RouterMessage) -> None:
        match message:
            case Prefill():
                self._prefill(message)
            case Cancel(attempt_id):
                self._drop(attempt_id)

    def die(self) -> None:
        for attempt_id in self.held:
            self._drop(attempt_id)
        super().die()

    def _prefill(self, message: Prefill) -> None:
        attempt_id = message.work.attempt_id
        if self.is_draining or self._has_fault():
            refused = Refused(attempt_id, "queue full", is_retryable=True, prefill_try=message.prefill_try)
            self.world.reply(self, refused)
            return
        self.jobs[attempt_id] = message
        self._later(0.03, lambda: self._compute(message))

    def _compute(self, message: Prefill) -> None:
        attempt_id, work = message.work.attempt_id, message.work
        if self.jobs.get(attempt_id) is not message:
            return
        if self._has_fault():
            self._drop(attempt_id)
            failed = AttemptFailed(attempt_id, "step failed", is_retryable=True, prefill_try=message.prefill_try)
            self.world.reply(self, failed)
            return
        for scores in scored(work, message.prefill_try):
            self.world.reply(self, scores)
        events = tuple(sample(work, work.token_ids, choice) for choice in work.choices)
        self.world.reply(self, FirstTokens(attempt_id, message.prefill_try, events, 0.01, 0.02, 16))
        self._later(0.01, lambda: self._ship(message))

    def _ship(self, message: Prefill) -> None:
        attempt_id = message.work.attempt_id
        if self.jobs.get(attempt_id) is not message:
            return
        if self._has_fault():
            self._drop(attempt_id)
            return
        del self.jobs[attempt_id]
        self._tell_decode(message, is_done=True)

    def _drop(self, attempt_id: AttemptId) -> None:
        message = self.jobs.pop(attempt_id, None)
        if message is not None:
            self._tell_decode(message, is_done=False)

    def _tell_decode(self, message: Prefill, *, is_done: bool) -> None:
        target = self.world.decode_worker(*message.decode_worker)
        if target is not None:
            attempt_id, prefill_try = message.work.attempt_id, message.prefill_try
            self.world.after(0.001, lambda: target.transfer_ended(attempt_id, prefill_try, is_done=is_done))


def reborn(worker: FakeWorker) -> FakeWorker:
    """The next life of a worker."""
    ref = worker.info.ref._replace(incarnation=str(int(worker.info.ref.incarnation) + 1))
    return type(worker)(replace(worker.info, ref=ref), worker.world)
