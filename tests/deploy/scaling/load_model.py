"""A made-up cluster on a virtual clock for the autoscaler: work arrives, workers do it, new workers take time to start,
and workers that change their role take less.

Fluid, not request by request: tokens wait for prefill, sequences run in decode. No IO.
"""

from dataclasses import dataclass, field

from common.values.config import AutoscaleSettings
from common.values.messages import Role
from deploy.scaling.autoscale_mix import Decision
from deploy.scaling.autoscaler import Autoscaler, PoolLoad, WorkerLoad

TOKENS_PER_S = 1000.0
PROMPT_TOKENS = 500
DECODE_S = 8.0
MAX_NUM_SEQS = 8
BLOCKS_PER_SEQ = 40
NUM_BLOCKS = 400
TICK_S = 0.5


@dataclass
class PoolModel:
    """Workers of a role: those that are ready, and when the starting ones will be."""

    size: int = 1
    num_ready: int = 1
    starting: list[float] = field(default_factory=list)

    def resize(self, size: int, now_s: float, start_s: float) -> None:
        self.starting += [now_s + start_s] * (size - self.size)
        self.size = size
        self.settle(now_s)

    def settle(self, now_s: float) -> None:
        self.starting = [at_s for at_s in self.starting if at_s > now_s]
        while len(self.starting) > self.size:
            self.starting.pop()
        self.num_ready = self.size - len(self.starting)


@dataclass
class ClusterModel:
    """`changes`: (when, role, from, to). `ttft_s`: how long the newest token would wait, at each tick.

    A request has `prompt_tokens` and is decoded for `decode_s`: the mix.
    """

    settings: AutoscaleSettings
    start_s: float = 10.0
    change_s: float = 2.0
    prompt_tokens: float = PROMPT_TOKENS
    decode_s: float = DECODE_S
    now_s: float = 0.0
    num_waiting_tokens: float = 0.0
    num_sequences: float = 0.0
    pools: dict[Role, PoolModel] = field(default_factory=lambda: {role: PoolModel() for role in Role})
    changes: list[tuple[float, Role, int, int]] = field(default_factory=list)
    ttft_s: list[tuple[float, float]] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.autoscaler = Autoscaler(self.settings)
        self._busy = 0.0

    def run(self, duration_s: float, requests_per_s: float) -> None:
        """Let so many requests arrive for so long, and the autoscaler look once per tick."""
        end_s = self.now_s + duration_s
        while self.now_s < end_s:
            self.now_s += TICK_S
            self._work(requests_per_s)
            self._decide()

    def _work(self, requests_per_s: float) -> None:
        speed = self.pools[Role.PREFILL].num_ready * TOKENS_PER_S
        arrived = requests_per_s * self.prompt_tokens * TICK_S
        done = min(self.num_waiting_tokens + arrived, speed * TICK_S)
        self.num_waiting_tokens += arrived - done
        self.ttft_s.append((self.now_s, self.num_waiting_tokens / speed))
        capacity = self.pools[Role.DECODE].num_ready * MAX_NUM_SEQS
        ended = min(self.num_sequences, capacity) * TICK_S / self.decode_s
        self.num_sequences = max(0.0, self.num_sequences + done / self.prompt_tokens - ended)
        self._busy += done / TICK_S / TOKENS_PER_S
        if requests_per_s == 0 and self.num_sequences < 0.5:
            self.num_sequences = 0.0

    def _decide(self) -> None:
        for pool in self.pools.values():
            pool.settle(self.now_s)
        decisions = self.autoscaler.decide_both({role: self.load(role) for role in Role}, self.now_s)
        self.decisions += decisions.values()
        changed = [decision for decision in decisions.values() if decision.is_change]
        is_shift = sum(decision.desired - decision.size for decision in changed) == 0
        for decision in changed:
            self.changes.append((self.now_s, decision.role, decision.size, decision.desired))
            pool = self.pools[decision.role]
            pool.resize(decision.desired, self.now_s, self.change_s if is_shift else self.start_s)

    def load(self, role: Role) -> PoolLoad:
        pool = self.pools[role]
        workers = self._prefill(pool.num_ready) if role is Role.PREFILL else self._decode(pool.num_ready)
        num_seated = sum(worker.num_running for worker in workers)
        num_queued = 0 if role is Role.PREFILL else max(0, round(self.num_sequences) - num_seated)
        return PoolLoad(pool.size, tuple(workers), num_queued)

    def _prefill(self, num_ready: int) -> list[WorkerLoad]:
        """A worker that computes for a quarter of the time is seen busy at every fourth look."""
        num_busy = min(num_ready, int(self._busy + 0.01))
        self._busy -= num_busy
        each = round(self.num_waiting_tokens / num_ready)
        return [
            WorkerLoad(num_running=int(idx < num_busy), num_waiting_tokens=each, tokens_per_s=TOKENS_PER_S)
            for idx in range(num_ready)
        ]

    def _decode(self, num_ready: int) -> list[WorkerLoad]:
        left, workers = round(self.num_sequences), []
        for idx in range(num_ready):
            running = min(MAX_NUM_SEQS, -(-left // (num_ready - idx)))
            left -= running
            blocks = running * BLOCKS_PER_SEQ
            workers.append(WorkerLoad(running, 0, 0, blocks, NUM_BLOCKS, MAX_NUM_SEQS, 0.0, 0.01))
        return workers
