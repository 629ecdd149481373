"""What one simulated run is going to do, drawn from its seed before it starts: so that parts of it can be left out."""

import random
from dataclasses import dataclass, replace

from common.values.ids import RequestId
from common.values.request import SamplingParams
from router.core.generation import GenerationRequest
from tests.simkit.cluster import Shape
from tests.simkit.layered_engine import VOCAB_SIZE

FAULTS_START_S, FAULTS_END_S = 1.5, 6.0
DEADLINE_S = 25.0
MAX_PROMPT_AND_OUTPUT = 128
REDIS_KINDS = (
    *("redis_gone", "redis_wiped", "redis_read_only", "redis_full", "redis_evicting", "redis_slow"),
    "index_stale",
)
FAULT_KINDS = (
    *("kill", "freeze", "cut_stream", "break_session", "corrupt", "slow_worker", "slow_wire", "fail_step", "drain"),
    *("router_crash", "router_freeze", "mute_stream", "mute_session", "clock_jump"),
    *REDIS_KINDS,
    "change_role",
)
# Swept, not fixed: some runs have no fault, some several a second.
FAULT_RATES_PER_S = (0.0, 0.3, 1.0, 3.0)
# At the same instant, in this share of cases, a second fault.
PAIR_SHARE = 0.3


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """`leaves_after_s`: the client goes; `stops_after_s`: it has enough of its first choice. None: it stays."""

    at_s: float
    spec: GenerationRequest
    leaves_after_s: float | None = None
    stops_after_s: float | None = None

    def __str__(self) -> str:
        spec = self.spec
        ends = f", leaves after {self.leaves_after_s:.3f} s" if self.leaves_after_s is not None else ""
        ends += f", stops choice 0 after {self.stops_after_s:.3f} s" if self.stops_after_s is not None else ""
        size = f"{len(spec.token_ids)} tokens, {spec.num_choices} choices of {spec.sampling.max_tokens}"
        size += ", prompt logprobs" * (spec.num_prompt_logprobs is not None)
        return f"{self.at_s:.3f} request {spec.request_id}: {size}{ends}"


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """`draw` decides what the fault draws: how long, which worker."""

    at_s: float
    kind: str
    draw: int

    def __str__(self) -> str:
        return f"{self.at_s:.3f} fault {self.kind}"


@dataclass(frozen=True, slots=True)
class Plan:
    """One run. `seed` also decides what the network and the steps draw."""

    seed: int
    shape: Shape
    requests: tuple[PlannedRequest, ...]
    faults: tuple[PlannedFault, ...]

    def __str__(self) -> str:
        lines = [f"seed {self.seed}", str(self.shape), *map(str, self.requests), *map(str, self.faults)]
        return "\n  ".join(lines)


def make_plan(seed: int, kinds: tuple[str, ...] = FAULT_KINDS, rate_per_s: float | None = None) -> Plan:
    """`kinds` limits the faults, `rate_per_s` fixes how often they come."""
    rng = random.Random(seed)
    shape = _shape(rng)
    rate = rng.choice(FAULT_RATES_PER_S) if rate_per_s is None else rate_per_s
    prefixes = [_tokens(rng, rng.randint(4, 40)) for _ in range(3)]
    requests = tuple(_request(rng, f"r{idx}", shape, prefixes) for idx in range(rng.randint(3, 10)))
    return Plan(seed, shape, requests, tuple(_faults(rng, kinds, rate)))


def canary(seed: int, idx: int, shape: Shape) -> GenerationRequest:
    """A request that must succeed once everything is healed."""
    rng = random.Random(f"canary {seed} {idx}")
    prompt = _tokens(rng, rng.randint(1, 12))
    params = SamplingParams(seed=rng.randrange(1 << 30), max_tokens=5)
    return GenerationRequest(RequestId(f"canary{idx}"), _fit(prompt, 5, shape), params, deadline_s=DEADLINE_S)


def _shape(rng: random.Random) -> Shape:
    shape = Shape(
        num_prefill=rng.randint(1, 3),
        num_decode=rng.randint(1, 3),
        prefill_blocks=rng.choice((24, 40, 96)),
        decode_blocks=rng.choice((12, 20, 64)),
        prefill_block_size=rng.choice((4, 8)),
        decode_block_size=rng.choice((4, 8)),
        local_prefill_max_tokens=rng.choice((0, 0, 8, 1000)),
    )
    return replace(shape, balance_prefill_max_tokens=24 if shape.local_prefill_max_tokens == 8 else 0)


def _tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(VOCAB_SIZE) for _ in range(count))


def _fit(prompt: tuple[int, ...], max_tokens: int, shape: Shape) -> tuple[int, ...]:
    """What can fit in the smallest pool: a prompt and its output in one sequence."""
    room = min(shape.decode_blocks * shape.decode_block_size, shape.prefill_blocks * shape.prefill_block_size)
    assert len(prompt) + max_tokens <= MAX_PROMPT_AND_OUTPUT
    return prompt[: room - max_tokens - 8]


def _request(rng: random.Random, name: str, shape: Shape, prefixes: list[tuple[int, ...]]) -> PlannedRequest:
    params = SamplingParams(
        seed=rng.randrange(1 << 30), max_tokens=rng.randint(1, 16), stop_token_ids=rng.choice(((), (7,)))
    )
    prompt = _fit((*rng.choice((*prefixes, ())), *_tokens(rng, rng.randint(1, 12))), params.max_tokens, shape)
    spec = GenerationRequest(
        RequestId(name),
        prompt,
        params,
        rng.choice((1, 1, 1, 2, 3)),
        priority=rng.choice((0, 0, 1)),
        deadline_s=DEADLINE_S,
        num_prompt_logprobs=random.Random(f"{name} {params.seed}").choice((None, None, None, 0)),
    )
    at_s = rng.uniform(FAULTS_START_S, FAULTS_END_S - 0.5)
    end = rng.random()
    leaves = rng.uniform(0.0, 0.5) if end < 0.2 else None
    stops = rng.uniform(0.05, 0.5) if 0.2 <= end < 0.3 else None
    return PlannedRequest(at_s, spec, leaves, stops)


def _faults(rng: random.Random, kinds: tuple[str, ...], rate_per_s: float) -> list[PlannedFault]:
    faults: list[PlannedFault] = []
    at_s = FAULTS_START_S
    while rate_per_s > 0 and (at_s := at_s + rng.expovariate(rate_per_s)) < FAULTS_END_S:
        for _ in range(1 + (rng.random() < PAIR_SHARE)):
            faults.append(PlannedFault(at_s, rng.choice(kinds), rng.randrange(1 << 30)))
    return faults
