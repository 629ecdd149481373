"""A whole cluster in one process on a virtual clock: a router, prefill and decode workers, an index, and their network.

Real: every core, the block pools, hashing, the index, the routing policy. Stand-ins: compute (`layered_engine`) and
sockets (`sessions`, and the router's streams here).
"""

import random
from dataclasses import dataclass, field
from typing import Any

from common.values.errors import PeerError
from common.values.hashing import block_hashes, hash_root
from common.values.ids import RequestId, RouterId, WorkerRef
from common.values.messages import Cancel, Drain, Prefill, Reserve, Role
from common.values.request import PromptLogprobs
from common.worker.events import DrainRequested, MessageReceived, RouterLost
from router.core.core import RouterCore
from router.core.events import (
    Deliver,
    DropWorker,
    LookupPrefix,
    PrefixFound,
    SendToWorker,
    WorkerConnected,
    WorkerLost,
    WorkerMessageReceived,
    WorkersListed,
)
from router.core.generation import Accepted, Failed, Finished, GenerationEvent, Tokens
from router.core.roster import Roster, StreamState
from router.core.router_limits import RouterLimits
from tests.simkit.nodes import Node, SimWorker
from tests.simkit.sessions import Sessions, Stream, Wire
from tests.simkit.sim_redis import LEASE_S, SimRedis
from tests.simkit.virtual_time import VirtualTime

POLL_S, STATS_S, RECONNECT_S = 0.5, 0.25, 0.3


@dataclass(frozen=True, slots=True)
class Shape:
    """What to simulate."""

    num_prefill: int = 2
    num_decode: int = 2
    prefill_blocks: int = 48
    decode_blocks: int = 48
    prefill_block_size: int = 4
    decode_block_size: int = 8
    local_prefill_max_tokens: int = 0
    max_num_queued: int = 64
    balance_prefill_max_tokens: int = 0


@dataclass(slots=True)
class Connection:
    """The router's stream to one life of a worker. `router_id`: of the life of the router that opened it."""

    router_id: RouterId
    worker: SimWorker
    to_worker: Stream
    to_router: Stream
    is_told_to_worker: bool = False  # that it ended


@dataclass(slots=True)
class Answer:
    """What a client has received."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    prompt_logprobs: list[float] = field(default_factory=list)
    accepted: Accepted | None = None
    first_s: float | None = None  # when its first token came
    end: Finished | Failed | None = None
    ended_s: float = 0.0


class SimCluster:
    """Owns all processes. One random generator decides everything that is not decided by the cores."""

    def __init__(self, shape: Shape, rng: random.Random) -> None:
        self.shape = shape
        self.rng = rng
        self.time = VirtualTime()
        self.wire = Wire(self.time, rng)
        self.redis = SimRedis(self.time, rng)
        self.log: list[str] = []
        self.answers: dict[RequestId, Answer] = {}
        self.workers: dict[str, SimWorker] = {}
        self._connections: dict[WorkerRef, Connection] = {}
        self._lives = 0
        self.sessions = Sessions(self.wire, self._find)
        self._ended: dict[WorkerRef, Connection] = {}  # the worker may not have heard of the end yet
        self.router = self._new_router()
        for idx in range(shape.num_prefill):
            self.start_worker(f"p{idx}", Role.PREFILL)
        for idx in range(shape.num_decode):
            self.start_worker(f"d{idx}", Role.DECODE)
        self._poll_registry()
        self._send_stats()

    # ---- processes ----------------------------------------------------------------------------------

    def start_worker(self, name: str, role: Role) -> None:
        """Start a process, or a new life of one."""
        self._lives += 1
        shape = self.shape
        is_prefill = role is Role.PREFILL
        worker = SimWorker(
            WorkerRef(name, str(self._lives)),
            role,
            self.time,
            self.rng,
            shape.prefill_blocks if is_prefill else shape.decode_blocks,
            shape.prefill_block_size if is_prefill else shape.decode_block_size,
        )
        worker.publish = self.redis.publish
        worker.send = lambda router_id, message: self._to_router(worker, router_id, message)
        worker.network = self.sessions.perform
        self.workers[name] = worker
        self._renew(worker)
        self.note(f"start {worker.ref}")

    def _renew(self, worker: SimWorker) -> None:
        """Until its process is gone, which Redis is not told."""
        if not worker.is_alive:
            return
        if not worker.is_frozen:
            self.redis.renew(worker.registration, worker.pool.cached_hashes)
        self.time.after(LEASE_S / 3, lambda: self._renew(worker))

    def kill(self, name: str) -> None:
        """SIGKILL: what it knew is gone; its peers hear of it in their own time."""
        worker = self.workers[name]
        worker.is_alive = False
        self.note(f"kill {worker.ref}")
        self.sessions.break_all_of(worker, "peer died")
        self.disconnect(worker, "worker died")

    def disconnect(self, worker: SimWorker, reason: str) -> bool:
        """Cut the router's stream; both ends hear of it, and what was under way to the router may arrive first."""
        connection = self._connections.pop(worker.ref, None)
        if connection is None:
            return False
        self._ended[worker.ref] = connection
        connection.to_worker.close()
        delays = [self.rng.uniform(0.0, 0.1) for _ in range(2)]
        if self.rng.random() < 0.5:
            connection.to_router.close()
        self.time.after(delays[0], lambda: self._tell_worker(connection))
        self.time.after(delays[1], lambda: self._tell_router(connection, self.router, reason))
        return True

    def _tell_worker(self, connection: Connection) -> None:
        if connection.is_told_to_worker:
            return
        connection.is_told_to_worker = True
        connection.worker.post(RouterLost(connection.router_id))

    def _tell_router(self, connection: Connection, router: Node, reason: str) -> None:
        connection.to_router.close()
        router.post(WorkerLost(connection.worker.ref, reason))

    def kill_router(self) -> None:
        """What it knew is gone: its clients see a broken connection, its workers a stream that ends."""
        self.note("kill router")
        self.router.is_alive = False
        for connection in list(self._connections.values()):
            self.disconnect(connection.worker, "router died")
        for answer in self.answers.values():
            if answer.end is None:
                answer.end, answer.ended_s = Failed(PeerError("connection closed")), self.time.now_s

    def restart_router(self) -> None:
        """A new life, often under the same name; it knows nothing."""
        if not self.router.is_alive:
            self.note("start router")
            self.router = self._new_router()

    def _new_router(self) -> Node:
        self._lives += 1
        shape = self.shape
        limits = RouterLimits(shape.local_prefill_max_tokens, shape.max_num_queued, shape.balance_prefill_max_tokens)
        self.router_id = RouterId("router" if self.rng.random() < 0.5 else f"router{self._lives}")
        router = Node("router", RouterCore(limits), self.time, self.rng.uniform(0.0, 1e4))
        router.perform = lambda effect: self._perform_router(router, effect)
        self._roster = Roster()
        self._held: dict[WorkerRef, None] = {}  # whom it holds a stream to, or tries to, in order
        return router

    def streams_of(self, worker: SimWorker) -> list[Stream]:
        """Both directions of the router's stream to a worker, if there is one."""
        connection = self._connections.get(worker.ref)
        return [] if connection is None else [connection.to_worker, connection.to_router]

    def make_index_lie(self, name: str) -> bool:
        """One worker is said to hold what all of them hold."""
        hashes = [block_hash for worker in self.workers.values() for block_hash in worker.pool.cached_hashes()]
        return self.redis.lie(self.workers[name].ref, hashes)

    def drain(self, name: str, grace_s: float) -> None:
        worker = self.workers[name]
        self.note(f"drain {worker.ref}")
        worker.post(DrainRequested(grace_s))

    def note(self, text: str) -> None:
        self.log.append(f"{self.time.now_s:.6f} {text}")

    def _find(self, ref: WorkerRef) -> SimWorker | None:
        worker = self.workers.get(ref.worker_id)
        return worker if worker is not None and worker.ref == ref else None

    # ---- router and workers -------------------------------------------------------------------------

    def _poll_registry(self) -> None:
        """As the router's directory does: whoever is held and not connected is tried again, whatever Redis says."""
        if self.router.is_alive and not self.router.is_frozen:
            if (listed := self.redis.live()) is not None:
                change = self._roster.follow(listed, {ref: self._state_of(ref) for ref in self._held}, self.time.now_s)
                self._held |= dict.fromkeys(sorted(change.connect))
                for ref in change.retire:
                    del self._held[ref]
                self.router.post(WorkersListed(change.known))
            for ref in self._held:
                worker = self._find(ref)
                if worker is not None and ref not in self._connections:
                    self.time.after(self.rng.uniform(0.0, RECONNECT_S), lambda worker=worker: self._connect(worker))  # type: ignore[misc]
        self.time.after(POLL_S, self._poll_registry)

    def _state_of(self, ref: WorkerRef) -> StreamState:
        return StreamState.OPEN if ref in self._connections else StreamState.BROKEN

    def _connect(self, worker: SimWorker) -> None:
        if not worker.is_alive or worker.is_frozen or worker.ref in self._connections:
            return
        if not self.router.is_alive or worker.ref not in self._held:
            return
        ref = worker.ref
        if (old := self._ended.pop(ref, None)) is not None and old.router_id == self.router_id:
            self._tell_worker(old)  # the worker ends the stream that it had from this router before
        to_worker = Stream(self.wire, lambda message: self._deliver_to_worker(connection, message))
        to_router = Stream(self.wire, self.router.post)
        connection = self._connections[ref] = Connection(self.router_id, worker, to_worker, to_router)
        to_router.send(WorkerConnected(worker.info, worker.ref.worker_id))

    def _send_stats(self) -> None:
        for connection in list(self._connections.values()):
            if connection.worker.is_alive and not connection.worker.is_frozen:
                self._to_router(connection.worker, None, connection.worker.stats())
        self.time.after(STATS_S, self._send_stats)

    def _to_router(self, worker: SimWorker, router_id: RouterId | None, message: Any) -> None:
        """`router_id`: whom the worker means; None: the connected one."""
        connection = self._connections.get(worker.ref)
        if connection is not None and worker.is_alive and router_id in (None, connection.router_id):
            connection.to_router.send(WorkerMessageReceived(worker.ref, message))

    def _deliver_to_worker(self, connection: Connection, message: Any) -> None:
        worker, router_id = connection.worker, connection.router_id
        match message:
            case Prefill() | Reserve() | Cancel():
                worker.post(MessageReceived(router_id, message))
            case Drain(grace_s):
                self.drain(worker.ref.worker_id, grace_s)

    def _perform_router(self, router: Node, effect: Any) -> None:
        match effect:
            case SendToWorker(ref, message):
                if (connection := self._connections.get(ref)) is not None:
                    connection.to_worker.send(message)
            case LookupPrefix():
                self.time.after(self.wire.delay_s(), lambda: self._look_up(router, effect))
            case DropWorker(ref, reason, is_final):
                if is_final:
                    self._roster.supersede(ref)
                    self._held.pop(ref, None)
                if (connection := self._connections.get(ref)) is not None:
                    self.disconnect(connection.worker, reason)
            case Deliver(request_id, event):
                self._deliver(request_id, event)

    def _look_up(self, router: Node, lookup: LookupPrefix) -> None:
        root = hash_root(dict(lookup.key.fingerprint.fields), lookup.key.block_size, lookup.cache_salt, lookup.adapter)
        hashes = block_hashes(lookup.token_ids, lookup.key.block_size, root)
        found = self.redis.known_prefix(hashes, lookup.workers)
        router.post(PrefixFound(lookup.attempt_id, lookup.key, tuple(found)))

    def _deliver(self, request_id: RequestId, event: GenerationEvent) -> None:
        answer = self.answers[request_id]
        assert answer.end is None, f"{request_id}: {event} after {answer.end}"
        self.note(f"deliver {request_id} {type(event).__name__}")
        if isinstance(event, Accepted):
            answer.accepted = event
        if isinstance(event, Finished | Failed):
            answer.end, answer.ended_s = event, self.time.now_s
            return
        if isinstance(event, PromptLogprobs):
            assert not answer.tokens, f"{request_id}: logprobs of the prompt after tokens"
            assert event.start == 1 + len(answer.prompt_logprobs), f"{request_id}: a gap or a repeat at {event.start}"
            answer.prompt_logprobs += event.logprobs
        if isinstance(event, Tokens) and answer.first_s is None:
            answer.first_s = self.time.now_s
        for token in getattr(event, "tokens", ()):
            output = answer.tokens.setdefault(token.choice_idx, [])
            assert token.position == len(output), f"{request_id}: position {token.position} after {len(output)} tokens"
            output.append(token.token.token_id)
