"""Processes of a simulated cluster: the production cores, their timers, and what can happen to a process."""

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from common.cluster.protocol import Registration
from common.engine.contract.executor import LayerComputed, StepFailed, StepFinished
from common.engine.kv.block_pool import BlockPool
from common.engine.scheduling.block_tables import PoolGroup
from common.engine.scheduling.scheduler import Limits
from common.values.ids import BlockHash, RouterId, WorkerRef
from common.values.messages import Role, WorkerInfo, WorkerMessage, WorkerStats
from common.values.request import Fingerprint
from common.worker.core import WorkerCore
from common.worker.events import PublishBlocks, RunStep, SendToRouter
from decode_worker.core import DecodeCore
from kvtransfer.chunk.plan import ChunkPlanner
from kvtransfer.receiver.core import ReceiverCore
from kvtransfer.sender.core import SenderCore
from prefill_worker.core import PrefillCore
from tests.caches import row_spec
from tests.simkit.layered_engine import NUM_LAYERS, LayeredEngine
from tests.simkit.virtual_time import VirtualTime

FINGERPRINT = Fingerprint((("model", "simulated"),))
MAX_MODEL_LEN = 128
LINK_TIMEOUT_S = 2.0
SECONDS_PER_TOKEN = 0.002
STEP_OVERHEAD_S = 0.004


class AnyCore(Protocol):
    def handle(self, event: Any, now_s: float) -> Sequence[Any]: ...

    def handle_deadline(self, now_s: float) -> Sequence[Any]: ...

    def next_deadline_s(self) -> float | None: ...

    def check_invariants(self) -> None: ...


class Node:
    """One process: a core, its timer, and whether it runs, is frozen or is gone.

    Its clock is the cluster's plus `skew_s`: no two processes agree on what time it is.
    """

    def __init__(self, name: str, core: AnyCore, time: VirtualTime, skew_s: float) -> None:
        self.name = name
        self.core = core
        self.is_alive = True
        self.is_frozen = False
        self.perform: Callable[[Any], None]
        self._time = time
        self._skew_s = skew_s
        self._waiting: deque[Any] = deque()
        self._timer = 0

    @property
    def now_s(self) -> float:
        return self._time.now_s + self._skew_s

    def post(self, event: Any) -> None:
        """Handle an event now; later, if the process is frozen; never, if it is gone."""
        if self.is_alive and self.is_frozen:
            self._waiting.append(event)
        elif self.is_alive:
            self._finish(self.core.handle(event, self.now_s))

    def freeze(self) -> None:
        self.is_frozen = True

    def jump(self, seconds: float) -> None:
        """Its clock goes ahead."""
        self._skew_s += seconds
        if self.is_alive and not self.is_frozen:
            self._set_timer()

    def thaw(self) -> None:
        self.is_frozen = False
        while self._waiting and not self.is_frozen:
            self.post(self._waiting.popleft())
        self._set_timer()

    def _finish(self, effects: Sequence[Any]) -> None:
        self.core.check_invariants()
        for effect in effects:
            self.perform(effect)
        self._set_timer()

    def _set_timer(self) -> None:
        self._timer += 1
        number, deadline_s = self._timer, self.core.next_deadline_s()
        if deadline_s is not None:
            self._time.after(deadline_s - self.now_s, lambda: self._fire(number))

    def _fire(self, number: int) -> None:
        if number == self._timer and self.is_alive and not self.is_frozen:
            self._finish(self.core.handle_deadline(self.now_s))


class SimWorker(Node):
    """A worker process of either role. `route` takes the effects that leave it."""

    def __init__(
        self, ref: WorkerRef, role: Role, time: VirtualTime, rng: random.Random, num_blocks: int, block_size: int
    ) -> None:
        planner = ChunkPlanner(row_spec(NUM_LAYERS, 8), min_chunk_bytes=64)
        self.pool = BlockPool(num_blocks, block_size)
        self.engine = LayeredEngine(block_size)
        self.ref = ref
        self.role = role
        self.slowness = 1.0
        self.failing_steps = 0
        self._rng = rng
        fields = dict(FINGERPRINT.fields)
        if role is Role.PREFILL:
            self.transfers: Any = SenderCore(planner, 1024, LINK_TIMEOUT_S)
            role_core: Any = PrefillCore([PoolGroup(self.pool)], self.transfers, Limits(24, 4, 16), fields, NUM_LAYERS)
        else:
            self.transfers = ReceiverCore(planner, 1024, LINK_TIMEOUT_S)
            limits = Limits(24, 6, 16, gap_budget_s=0.02)
            role_core = DecodeCore([PoolGroup(self.pool)], self.transfers, limits, fields, reservation_timeout_s=15.0)
        super().__init__(str(ref), WorkerCore(role_core), time, rng.uniform(0.0, 1e4))
        self.info = WorkerInfo(
            ref=ref,
            role=role,
            model_name="simulated",
            block_size=block_size,
            num_blocks=num_blocks,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=6,
            pid=0,
            fingerprint=FINGERPRINT,
            handoff_address=ref.worker_id if role is Role.DECODE else "",
        )
        self.publish: Callable[[WorkerRef, Sequence[BlockHash], Sequence[BlockHash]], None]
        self.send: Callable[[RouterId, WorkerMessage], None]
        self.network: Callable[[SimWorker, Any], None]
        self.perform = self._perform

    @property
    def registration(self) -> Registration:
        return Registration(self.ref, self.role, self.ref.worker_id)

    def stats(self) -> WorkerStats:
        stats: WorkerStats = self.core.stats(self.now_s)  # type: ignore[attr-defined]
        return stats

    def _perform(self, effect: Any) -> None:
        match effect:
            case RunStep():
                self._run_step(effect)
            case SendToRouter(router_id, message):
                self.send(router_id, message)
            case PublishBlocks(stored, evicted):
                self.publish(self.ref, stored, evicted)
            case _:
                self.network(self, effect)

    def _run_step(self, effect: RunStep) -> None:
        plan = effect.plan
        duration_s = (
            (STEP_OVERHEAD_S + SECONDS_PER_TOKEN * plan.num_tokens) * self.slowness * self._rng.uniform(0.8, 1.2)
        )
        if self.failing_steps:
            self.failing_steps -= 1
            self._time.after(duration_s, lambda: self.post(StepFailed(plan.step_id, "RuntimeError")))
            return
        self.engine.begin(plan)
        for layer in range(NUM_LAYERS):
            delay_s = duration_s * (layer + 1) / (NUM_LAYERS + 1)
            self._time.after(delay_s, lambda layer=layer: self._layer(effect, layer))  # type: ignore[misc]
        self._time.after(duration_s, lambda: self._end_step(effect, duration_s))

    def _layer(self, effect: RunStep, layer: int) -> None:
        self.engine.compute_layer(effect.plan, layer)
        if effect.reports_layers:
            self.post(LayerComputed(effect.plan.step_id, layer + 1))

    def _end_step(self, effect: RunStep, duration_s: float) -> None:
        result = self.engine.finish(effect.plan, duration_s)
        self.post(StepFinished(result))
