"""One prefill core with the real sender core under a random life: what is shipped is exact, every block comes back.

A chunk is "packed" at any time between SendChunk and ChunkPacked; what is in the blocks then must be the prompt's KV,
whatever was cancelled, recycled or computed meanwhile. First anything may happen; then the faults stop.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from common.engine.contract.executor import LayerComputed, StepFailed, StepFinished
from common.engine.contract.plan import StepPlan, StepResult
from common.engine.kv.block_pool import BlockPool
from common.engine.scheduling.block_tables import PoolGroup
from common.engine.scheduling.scheduler import Limits
from common.values.ids import BlockHash, RouterId, TransferId, WorkerRef
from common.values.messages import AttemptFailed, Cancel, FirstTokens, Prefill, Refused
from common.values.request import SamplingParams, Work
from common.worker.core import WorkerCore
from common.worker.events import (
    DrainRequested,
    MessageReceived,
    PublishBlocks,
    RouterLost,
    RunStep,
    SendToRouter,
)
from kvtransfer.chunk.plan import ChunkPlanner
from kvtransfer.events import (
    AcknowledgedByPeer,
    CancelledByPeer,
    Chunk,
    ChunkPacked,
    ChunkSent,
    ConnectPeer,
    DropPeer,
    PeerLost,
    PeerReady,
    SendCancel,
    SendChunk,
    SendFinished,
)
from kvtransfer.sender.core import SenderCore
from prefill_worker.core import PrefillCore
from tests.caches import row_spec
from tests.core_bench import ROUTER, attempt, draw_action, tokens
from tests.prefill_worker.harness import NUM_LAYERS
from tests.simkit.fake_engine import FakeRunner, contents, expected_output

SEEDS = range(60)
NUM_ACTIONS = 300
SECOND = RouterId("second")
PEERS = (WorkerRef("d0", "1"), WorkerRef("d1", "1"))


@dataclass
class Peer:
    """A decode worker as the sender sees it: work that the core waits for, in order."""

    is_up: bool = False
    is_connecting: bool = False
    to_pack: list[SendChunk] = field(default_factory=list)
    to_send: list[SendChunk] = field(default_factory=list)
    to_acknowledge: list[TransferId] = field(default_factory=list)


class Life:
    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.now_s = 0.0
        self.has_faults = rng.random() < 0.6
        block_size = rng.choice([2, 4, 5])
        self.pool = BlockPool(rng.randint(6, 30), block_size)
        planner = ChunkPlanner(row_spec(NUM_LAYERS, 10), min_chunk_bytes=rng.choice([1, 200, 10_000]))
        sender = SenderCore(planner, max_inflight_bytes=rng.choice([500, 100_000]), link_timeout_s=20.0)
        limits = Limits(rng.choice([1, 3, 8, 64]), rng.choice([1, 2, 8]), rng.choice([0, 2, 8]))
        self.core = WorkerCore(PrefillCore([PoolGroup(self.pool)], sender, limits, {"model": "m"}, NUM_LAYERS))
        self.runner = FakeRunner(block_size)
        self.plan: StepPlan | None = None
        self.result: StepResult | None = None
        self.num_layers_done = 0
        self.peers = {ref: Peer() for ref in PEERS}
        self.asked: dict[TransferId, Prefill] = {}
        self.is_expendable: set[TransferId] = set()  # cancelled, of a lost router, superseded
        self.answers: dict[TransferId, list[FirstTokens | Refused | AttemptFailed]] = {}
        self.shipped: dict[TransferId, list[Chunk]] = {}
        self.finished: dict[TransferId, int] = {}
        self.index: set[BlockHash] = set()

    # ---- actions ------------------------------------------------------------------------------------

    def act(self) -> None:
        work: list[tuple[int, Callable[[], object]]] = [(12, self.prefill), (40, self.compute), (30, self.move_peer)]
        faults: list[tuple[int, Callable[[], object]]] = [
            (4, self.cancel),
            (2, self.supersede),
            (1, self.fail_step),
            (1, self.lose_peer),
            (2, self.refuse_transfer),
            (1, self.lose_router),
            (1, lambda: self.advance(self.rng.choice([0.5, 5.0, 25.0]))),
        ]
        draw_action(self.rng, work + faults if self.has_faults else work)

    def prefill(self) -> None:
        rng = self.rng
        prompt = (*tokens(rng.choice([0, 8, 16]), first=100), *tokens(rng.randint(1, 20), first=rng.choice([500, 600])))
        work = Work(
            attempt(f"r{len(self.asked)}"),
            prompt,
            len(prompt),
            SamplingParams(seed=rng.randint(0, 3), max_tokens=4),
            choices=tuple(range(rng.choice([1, 1, 3]))),
            priority=rng.choice([0, 0, 1]),
            deadline_s=rng.choice([30.0, 1000.0]) if self.has_faults else 10_000.0,
        )
        self.ask(Prefill(work, 0, rng.choice(PEERS), "address", rng.choice([0, rng.randrange(len(prompt))])))

    def ask(self, message: Prefill) -> None:
        transfer_id = TransferId(message.work.attempt_id, message.prefill_try)
        self.asked[transfer_id] = message
        self.handle(MessageReceived(router_of(transfer_id), message))

    def supersede(self) -> None:
        if self.asked:
            old = self.rng.choice(list(self.asked))
            self.is_expendable.update(t for t in self.asked if t.attempt_id == old.attempt_id)
            newest = max(t.prefill_try for t in self.asked if t.attempt_id == old.attempt_id)
            message = self.asked[old]
            self.ask(Prefill(message.work, newest + 1, self.rng.choice(PEERS), "address", message.first_missing_token))

    def cancel(self) -> None:
        if self.asked:
            transfer_id = self.rng.choice(list(self.asked)[-8:])
            self.is_expendable.update(t for t in self.asked if t.attempt_id == transfer_id.attempt_id)
            self.handle(MessageReceived(ROUTER, Cancel(transfer_id.attempt_id)))

    def lose_router(self) -> None:
        self.is_expendable.update(t for t in self.asked if router_of(t) == SECOND)
        self.handle(RouterLost(SECOND))

    def compute(self) -> None:
        """One layer of the running step, or its end."""
        if self.plan is None:
            return
        if self.result is None:
            self.result = self.runner.run(self.plan)
        if self.num_layers_done < NUM_LAYERS:
            self.num_layers_done += 1
            self.handle(LayerComputed(self.plan.step_id, self.num_layers_done))
        else:
            self.plan, result, self.result = None, self.result, None
            self.handle(StepFinished(result))

    def fail_step(self) -> None:
        if self.plan is not None:
            plan, self.plan, self.result = self.plan, None, None
            self.handle(StepFailed(plan.step_id, "injected"))

    def move_peer(self, ref: WorkerRef | None = None) -> None:
        ref = ref or self.rng.choice(PEERS)
        peer = self.peers[ref]
        if peer.is_connecting:
            peer.is_connecting, peer.is_up = False, True
            self.handle(PeerReady(ref))
            return
        moves = [
            move
            for queue, move in (
                (peer.to_pack, self.pack),
                (peer.to_send, self.send),
                (peer.to_acknowledge, self.acknowledge),
            )
            if queue
        ]
        if moves:
            self.rng.choice(moves)(peer)

    def pack(self, peer: Peer) -> None:
        effect = peer.to_pack.pop(0)
        self.check_packed(effect)
        peer.to_send.append(effect)
        self.handle(ChunkPacked(effect.transfer_id, effect.chunk.seq))

    def send(self, peer: Peer) -> None:
        effect = peer.to_send.pop(0)
        self.handle(ChunkSent(effect.transfer_id, effect.chunk.seq))

    def acknowledge(self, peer: Peer) -> None:
        """Once everything of the transfer was announced and is over the link."""
        transfer_id = peer.to_acknowledge[0]
        is_announced = len(self.shipped.get(transfer_id, ())) == self.finished[transfer_id]
        if is_announced and not any(effect.transfer_id == transfer_id for effect in (*peer.to_pack, *peer.to_send)):
            peer.to_acknowledge.pop(0)
            self.handle(AcknowledgedByPeer(transfer_id))

    def refuse_transfer(self) -> None:
        for peer in self.peers.values():
            for effect in peer.to_pack[:1]:
                self.is_expendable.add(effect.transfer_id)
                if effect.transfer_id in peer.to_acknowledge:
                    peer.to_acknowledge.remove(effect.transfer_id)
                self.handle(CancelledByPeer(effect.transfer_id, "injected"))

    def lose_peer(self, ref: WorkerRef | None = None) -> None:
        ref = ref or self.rng.choice(PEERS)
        if self.peers[ref].is_up or self.peers[ref].is_connecting:
            self.is_expendable.update(t for t, message in self.asked.items() if message.decode_worker == ref)
            self.peers[ref] = Peer()
            self.handle(PeerLost(ref, "injected"))

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
        self.perform(self.core.handle_deadline(self.now_s))

    # ---- effects ------------------------------------------------------------------------------------

    def handle(self, event: Any) -> None:
        self.perform(self.core.handle(event, self.now_s))

    def perform(self, effects: list[Any]) -> None:
        self.core.check_invariants()
        for effect in effects:
            match effect:
                case RunStep(plan):
                    assert self.plan is None
                    self.plan, self.num_layers_done = plan, 0
                case SendToRouter(_, message):
                    assert message.prefill_try is not None
                    self.answers.setdefault(TransferId(message.attempt_id, message.prefill_try), []).append(message)
                case PublishBlocks(stored, evicted):
                    assert effect is effects[-1]
                    self.publish(set(stored), set(evicted))
                case _:
                    self.perform_transfer(effect)
        for effect in effects:
            if isinstance(effect, DropPeer):
                self.lose_peer(effect.peer)

    def perform_transfer(self, effect: Any) -> None:
        match effect:
            case ConnectPeer(peer):
                self.peers[peer].is_connecting = True
            case SendChunk(peer):
                self.shipped.setdefault(effect.transfer_id, []).append(effect.chunk)
                self.peers[peer].to_pack.append(effect)
            case SendFinished(peer, transfer_id, num_chunks):
                self.finished[transfer_id] = num_chunks
                self.peers[peer].to_acknowledge.append(transfer_id)
            case SendCancel(peer, transfer_id):
                if transfer_id in self.peers[peer].to_acknowledge:
                    self.peers[peer].to_acknowledge.remove(transfer_id)

    def publish(self, stored: set[BlockHash], evicted: set[BlockHash]) -> None:
        assert not self.index & stored
        assert self.index >= evicted
        self.index = (self.index | stored) - evicted

    # ---- checks -------------------------------------------------------------------------------------

    def check_packed(self, effect: SendChunk) -> None:
        """The blocks hold the prompt's KV, unless the transfer failed with its step before it was computed."""
        chunk, expected = effect.chunk, contents(self.asked[effect.transfer_id].work.token_ids)
        for position in range(chunk.token_start, chunk.token_end):
            assert self.runner.kv.read(effect.block_table, position) == expected[position], str(effect.transfer_id)

    def heal(self) -> None:
        for _ in range(20_000):
            if self.plan is not None:
                self.compute()
            for ref in PEERS:
                self.move_peer(ref)
            is_moving = any(p.is_connecting or p.to_pack or p.to_send or p.to_acknowledge for p in self.peers.values())
            if self.plan is None and not is_moving:
                return
        raise AssertionError("the core does not come to rest")

    def check(self) -> None:
        stats = self.pool.stats()
        assert (stats.used, stats.held) == (0, 0)
        assert self.core.next_deadline_s() is None
        assert self.index == set(self.pool.cached_hashes())
        for transfer_id, message in self.asked.items():
            self.check_answer(transfer_id, message)
        self.handle(DrainRequested(1.0))
        assert self.core.next_deadline_s() is None

    def check_answer(self, transfer_id: TransferId, message: Prefill) -> None:
        answers, work = self.answers.get(transfer_id, []), message.work
        if len(answers) == 2:  # a link lost after the first tokens
            first, last = answers
            assert isinstance(first, FirstTokens)
            assert isinstance(last, AttemptFailed)
            assert last.reason.startswith("transfer: link_lost")
            assert self.has_faults
            answers = answers[:1]
        assert len(answers) == 1 or (not answers and transfer_id in self.is_expendable), f"{transfer_id}: {answers}"
        for answer in answers:
            if isinstance(answer, FirstTokens):
                drawn = [event.token.token_id for event in answer.tokens]
                assert drawn == [expected_output(work, choice)[0] for choice in work.choices]
                if transfer_id not in self.is_expendable and not self.has_faults:
                    self.check_shipped(transfer_id, message)
            elif not self.has_faults:
                assert isinstance(answer, Refused)

    def check_shipped(self, transfer_id: TransferId, message: Prefill) -> None:
        """Every layer of every missing token exactly once, in order."""
        chunks = self.shipped[transfer_id]
        assert [chunk.seq for chunk in chunks] == list(range(self.finished[transfer_id]))
        cells = [
            (layer, token)
            for chunk in chunks
            for layer in range(chunk.layer_start, chunk.layer_end)
            for token in range(chunk.token_start, chunk.token_end)
        ]
        missing = range(message.first_missing_token, len(message.work.token_ids))
        assert sorted(cells) == [(layer, token) for layer in range(NUM_LAYERS) for token in missing]


def router_of(transfer_id: TransferId) -> RouterId:
    return SECOND if int(transfer_id.attempt_id.request_id[1:]) % 4 == 0 else ROUTER


@pytest.mark.parametrize("seed", SEEDS)
def test_random_life_ships_exact_kv_and_leaves_nothing(seed: int) -> None:
    life = Life(seed)
    for _ in range(NUM_ACTIONS):
        life.act()
    life.heal()
    life.check()
