"""Every interleaving of one request through a whole cluster: router, prefill and decode cores with their pools.

Real: the three cores with the handoff cores inside, block pools, deadlines. Stand-ins: compute (`layered_engine`, whose
next token depends on every KV row read), the handoff's sessions (`handoff_net`), the router's streams (`streams`).

Faults, by budget: the client leaves, a process dies and comes back, a handoff session breaks, a router stream is cut,
Redis answers what one answers that is in trouble. One that is gone or late answers nothing, which is no event.
Time stands still while anything can happen.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from common.values.errors import RequestCancelled
from common.values.ids import RequestId, RouterId
from common.values.messages import Role
from common.values.request import PromptLogprobs, SamplingParams
from common.worker.events import MessageReceived, PublishBlocks, RouterLost, RunStep, SendToRouter
from kvtransfer.events import SendChunk, WriteChunk
from router.core.core import RouterCore
from router.core.events import (
    Deliver,
    DropWorker,
    EndRequested,
    RequestSubmitted,
    SendToWorker,
    WorkerConnected,
    WorkerLost,
    WorkersListed,
)
from router.core.generation import Failed, Finished, GenerationRequest, Tokens
from router.core.roster import Roster, StreamState
from router.core.router_limits import RouterLimits
from tests.simkit import cluster_checks
from tests.simkit.handoff_net import HandoffNet
from tests.simkit.handoff_parts import name_of, next_life, ref_of
from tests.simkit.layered_engine import Payload, expected_logprobs, expected_output, read_chunk, write_chunk
from tests.simkit.small_process import SmallProcess
from tests.simkit.streams import Streams

ROUTER = RouterId("router")
PROMPT, PARAMS = (3, 5), SamplingParams(max_tokens=2, seed=1)
REQUEST = GenerationRequest(RequestId("r"), PROMPT, PARAMS, deadline_s=1e6)
FOREVER_S = 1e9


class ClusterWorld:
    """One request. A process is named by its life: "p0.1", after its death "p0.2".

    The prompt has two tokens: two prefill chunks with `chunk_tokens` 1, else one; each is shipped layer by layer.
    """

    def __init__(
        self,
        faults: dict[str, int] | None = None,
        *,
        num_prefill: int = 1,
        num_decode: int = 1,
        chunk_tokens: int = 1,
        max_tokens: int = 2,
        is_scored: bool = False,
    ) -> None:
        self.chunk_tokens = chunk_tokens
        params = replace(PARAMS, max_tokens=max_tokens)
        self.expected = expected_output(PROMPT, params, 0)
        self.expected_scores = expected_logprobs(PROMPT) if is_scored else []
        self.account: tuple[object, ...] = ()
        self.budget = dict(faults or {})
        self.now_s = 1.0
        self.router = RouterCore(RouterLimits(worker_silence_s=FOREVER_S, num_kept_requests=0))
        roles = {f"p{idx}.1": Role.PREFILL for idx in range(num_prefill)}
        roles |= {f"d{idx}.1": Role.DECODE for idx in range(num_decode)}
        self.roster, self.lives = Roster(), list(roles)
        self.processes = {name: SmallProcess(name, role, chunk_tokens) for name, role in roles.items()}
        self.net = HandoffNet(self.processes)
        self.streams = Streams()
        self.output: list[int] = []
        self.scores: list[float] = []
        self.end = ""
        for process in self.processes.values():
            self.streams.open(process.name)
            self.to_router(WorkerConnected(process.info, ""))
        num_scores = 0 if is_scored else None
        self.to_router(RequestSubmitted(replace(REQUEST, sampling=params, num_prompt_logprobs=num_scores)))

    # ---- what may happen ----------------------------------------------------------------------------

    def choices(self) -> Sequence[str]:
        choices = [f"compute {name}" for name, process in self.processes.items() if process.step is not None]
        choices += self.net.choices()
        choices += self.streams.choices(self.processes)
        if not choices and self.next_deadline_s() is not None:
            choices.append("deadline 0")
        return choices + [f"!{kind} {target}" for kind in self.budget for target in self._targets(kind)]

    def _targets(self, kind: str) -> list[str]:
        if self.budget[kind] == 0:
            return []
        match kind:
            case "leave":
                return [] if self.end else ["0"]
            case "crash_prefill" | "crash_decode":
                return [name for name in self.processes if name[0] == kind.removeprefix("crash_")[0]]
            case "break":
                return [str(idx) for idx, s in enumerate(self.net.sessions.values()) if not s.is_broken]
            case "cut":
                return self.streams.open_names()
            case "redis":  # full, and emptied before; evicting; read-only: dead lives are listed still
                return ["nobody", *self.processes, "everybody"]
        raise AssertionError(kind)

    # ---- letting it happen --------------------------------------------------------------------------

    def apply(self, choice: str) -> None:
        action, _, target = choice.lstrip("!").partition(" ")
        if choice.startswith("!"):
            self.budget[action] -= 1
            getattr(self, f"_fault_{action}")(target)
        elif action == "deadline":
            self._pass_deadline()
        elif action == "compute":
            for event in self.processes[target].compute():
                self.to_process(target, event)
        elif action in ("to_worker", "to_router", "worker_hears_end", "router_hears_end", "reconnect"):
            getattr(self, f"_do_{action}")(target)
        else:
            self.net.apply(self, choice)

    def _do_to_worker(self, name: str) -> None:
        self.to_process(name, MessageReceived(ROUTER, self.streams.of(name).to_worker.pop(0)))

    def _do_to_router(self, name: str) -> None:
        self.to_router(self.streams.of(name).to_router.pop(0))

    def _do_worker_hears_end(self, name: str) -> None:
        self.streams.worker_heard(name)
        self.to_process(name, RouterLost(ROUTER))

    def _do_router_hears_end(self, name: str) -> None:
        self.streams.router_heard(name)
        self.to_router(WorkerLost(ref_of(name), "stream ended"))

    def _do_reconnect(self, name: str) -> None:
        """The router comes back; the worker ends the stream that it had from it before."""
        if self.streams.is_end_unheard_by_worker(name):
            self._do_worker_hears_end(name)
        self.streams.open(name)
        self.to_router(WorkerConnected(self.processes[name].info, ""))

    def _fault_leave(self, _: str) -> None:
        self.to_router(EndRequested(REQUEST.request_id, RequestCancelled("the client left")))

    def _fault_crash_prefill(self, name: str) -> None:
        role = self.processes.pop(name).role
        self.lives.append(next_life(name))
        self.processes[next_life(name)] = SmallProcess(next_life(name), role, self.chunk_tokens)
        self.net.kill(name, next_life(name))
        self.streams.kill(name)

    _fault_crash_decode = _fault_crash_prefill

    def _fault_break(self, idx: str) -> None:
        self.net.break_session(*self.net.session(int(idx)))

    def _fault_cut(self, name: str) -> None:
        self.streams.cut(name)

    def _fault_redis(self, whom: str) -> None:
        """It lists nobody, one worker, or every life that ever was. No open stream may be given up for that."""
        names = {"nobody": [], "everybody": self.lives}.get(whom, [whom])
        streams = {
            ref_of(name): StreamState.OPEN if self.streams.is_believed(name) else StreamState.BROKEN
            for name in self.lives
        }
        change = self.roster.follow(frozenset(map(ref_of, names)), streams, self.now_s)
        given_up = [ref for ref in change.retire if streams[ref] is StreamState.OPEN]
        assert not given_up, f"{given_up} is given up, whose stream is open"
        self.to_router(WorkersListed(change.known))

    def _pass_deadline(self) -> None:
        deadline_s = self.next_deadline_s()
        assert deadline_s is not None
        self.now_s = max(self.now_s, deadline_s)
        self._perform_router(self.router.handle_deadline(self.now_s))
        for name in list(self.processes):
            self._perform(name, self.processes[name].core.handle_deadline(self.now_s))

    def next_deadline_s(self) -> float | None:
        """None also when only the far future has something: a router's watch over silent workers."""
        cores: list[Any] = [self.router, *(process.core for process in self.processes.values())]
        deadlines = [deadline_s for core in cores if (deadline_s := core.next_deadline_s()) is not None]
        return min((deadline_s for deadline_s in deadlines if deadline_s < FOREVER_S), default=None)

    # ---- performing effects -------------------------------------------------------------------------

    def to_process(self, name: str, event: Any) -> None:
        self._perform(name, self.processes[name].core.handle(event, self.now_s))

    to_sender = to_receiver = to_process

    def to_router(self, event: Any) -> None:
        self._perform_router(self.router.handle(event, self.now_s))

    def _perform(self, name: str, effects: Sequence[Any]) -> None:
        process = self.processes[name]
        for effect in effects:
            match effect:
                case RunStep():
                    process.start(effect)
                case SendToRouter(_, message):
                    self.streams.send_to_router(name, message)
                case PublishBlocks():
                    raise AssertionError("no block is ever full here")
                case _ if process.role is Role.PREFILL:
                    self.net.perform_sender(name, effect)
                case _:
                    self.net.perform_receiver(name, effect)

    def _perform_router(self, effects: Sequence[Any]) -> None:
        for effect in effects:
            match effect:
                case SendToWorker(ref, message):
                    self.streams.send_to_worker(name_of(ref), message)
                case DropWorker(ref, _, is_final):
                    if is_final:
                        self.roster.supersede(ref)
                    self.streams.cut(name_of(ref))
                case Deliver(_, event):
                    self._deliver(event)

    def _deliver(self, event: object) -> None:
        assert not self.end, f"{event} after {self.end}"
        match event:
            case PromptLogprobs(start, logprobs):
                assert start == 1 + len(self.scores), f"logprobs from {start} on after {self.scores}"
                self.scores += logprobs
            case Tokens(tokens):
                assert self.scores == self.expected_scores, f"tokens after the logprobs {self.scores}"
                for token in tokens:
                    assert token.position == len(self.output), f"position {token.position} after {self.output}"
                    self.output.append(token.token.token_id)
                assert self.output == self.expected[: len(self.output)], f"{self.output} instead of {self.expected}"
            case Finished(num_cached_tokens=num_cached, timings=timings):
                num_prefilled = sum(num_tokens for _, _, num_tokens in timings.prefill_chunks)
                self.end, self.account = "Finished", (num_cached, num_prefilled, timings.kv_chunks, timings.kv_bytes)
            case Failed():
                self.end = "Failed"

    def read_chunk(self, name: str, effect: SendChunk) -> Payload:
        return read_chunk(self.processes[name].engine, effect.chunk, effect.block_table)

    def write_chunk(self, name: str, effect: WriteChunk, payload: Payload) -> None:
        write_chunk(self.processes[name].engine, effect.chunk, effect.block_table, payload)

    # ---- properties ---------------------------------------------------------------------------------

    def check(self) -> None:
        cluster_checks.check(self)

    def check_quiet(self) -> None:
        cluster_checks.check_quiet(self)

    def key_parts(self) -> object:
        requests = self.router._requests
        state = [
            self.budget,
            self.now_s,
            self.processes,
            self.net,
            self.streams,
            self.output,
            self.scores,
            self.end,
            self.account,
            sorted(self.roster._missing_since_s.items()),
            sorted(self.roster._superseded),
        ]
        return state, self.router._pool, requests.live, requests.timers, cluster_checks.identity_facts(self)
