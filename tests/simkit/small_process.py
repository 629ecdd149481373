"""A worker process of a `ClusterWorld`: a production core over a tiny pool, and its compute, layer by layer."""

from typing import Any

from common.engine.contract.executor import LayerComputed, StepFinished
from common.engine.kv.block_pool import BlockPool
from common.engine.scheduling.block_tables import PoolGroup
from common.engine.scheduling.scheduler import Limits
from common.values.messages import Role, WorkerInfo
from common.values.request import Fingerprint
from common.worker.core import WorkerCore
from common.worker.events import RunStep
from decode_worker.core import DecodeCore
from prefill_worker.core import PrefillCore
from tests.simkit.handoff_parts import Silent, new_receiver, new_sender, ref_of
from tests.simkit.layered_engine import NUM_LAYERS, LayeredEngine

NUM_BLOCKS, BLOCK_SIZE = 2, 4
STEP_S = 0.001


class SmallProcess:
    """`step` is the running step and how many layers it has computed."""

    def __init__(self, name: str, role: Role, chunk_tokens: int) -> None:
        self.name = name
        self.role = role
        self.pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
        self.engine = LayeredEngine(BLOCK_SIZE)
        self.step: tuple[RunStep, int] | None = None
        role_core: Any
        groups = [PoolGroup(self.pool)]
        if role is Role.PREFILL:
            role_core = PrefillCore(groups, new_sender(), Limits(chunk_tokens, 1, 4), {}, NUM_LAYERS)
        else:
            role_core = DecodeCore(
                [PoolGroup(self.pool)], new_receiver(), Limits(4, 2, 4), {}, reservation_timeout_s=1e6
            )
        role_core.state.history = Silent()  # what was is not part of what is
        self.core: WorkerCore[Any] = WorkerCore(role_core)

    @property
    def info(self) -> WorkerInfo:
        return WorkerInfo(
            ref=ref_of(self.name),
            role=self.role,
            model_name="small",
            block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
            max_model_len=NUM_BLOCKS * BLOCK_SIZE,
            max_num_seqs=2,
            pid=0,
            fingerprint=Fingerprint(()),
            handoff_address=self.name,
        )

    def start(self, effect: RunStep) -> None:
        assert self.step is None, "two steps at once"
        self.engine.begin(effect.plan)
        self.step = (effect, 0)

    def compute(self) -> list[LayerComputed | StepFinished]:
        """One more layer where somebody wants to know, else all that is left; what to tell the core."""
        assert self.step is not None
        effect, done = self.step
        end = done + 1 if effect.reports_layers else NUM_LAYERS
        for layer in range(done, end):
            self.engine.compute_layer(effect.plan, layer)
        if end < NUM_LAYERS:
            self.step = (effect, end)
            return [LayerComputed(effect.plan.step_id, end)]
        self.step = None
        return [StepFinished(self.engine.finish(effect.plan, STEP_S))]
