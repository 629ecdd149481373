"""Every kind of generation, prefilled here or shipped, in every circumstance: the tokens of one process, in float32.

Two workers' real cores, schedulers and runners, stepped by hand; only the network between them is left out: KV is
copied from cache to cache. What a cluster adds to that is in tests/cluster.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from common.engine.contract.executor import StepFinished
from common.engine.contract.plan import StepResult
from common.engine.kv.block_pool import BlockPool
from common.engine.loading import LoadedModel
from common.engine.scheduling.block_tables import PoolGroup
from common.guided import grammar
from common.values.ids import TransferId
from common.values.messages import Refused
from common.values.request import SampledToken, SamplingParams, Work
from kvtransfer.events import FinishAnnounced, FirstToken
from tests.decode_worker.harness import PREFILL, Bench, job
from tests.decode_worker.tiny_loaded import load_tiny
from tests.one_process import generate_tokens
from tests.tiny_model import write_tiny_model
from tests.transformers_beams import beams

BLOCK_SIZE = 4
NUM_BLOCKS = 160
# The shortest first, a long one last: its output finds few blocks left in a small pool.
PROMPTS = [(7, 8, 9, 10, 7, 8, 9), (41,) * 16, tuple(range(10, 47))]
KILLED_AT = 5
MAX_TOKENS = 14


@dataclass(frozen=True)
class Kind:
    params: SamplingParams
    num_choices: int = 1
    max_draft_tokens: int = 0


GREEDY = SamplingParams(seed=1, max_tokens=MAX_TOKENS, temperature=0.0)
SAMPLED = replace(GREEDY, temperature=0.4)
GUIDED = replace(SAMPLED, grammar=grammar.of_regex("(ab|cd){30,60}"))
SHAPED = replace(GREEDY, frequency_penalty=0.1, repetition_penalty=1.05, stop_token_ids=tuple(range(3, 200, 2)))
KINDS = {
    "guided": Kind(GUIDED),
    "logprobs": Kind(replace(SAMPLED, num_logprobs=2)),
    "four choices": Kind(SAMPLED, num_choices=4),
    "beams": Kind(replace(GREEDY, num_beams=4), num_choices=2),
    "speculative": Kind(GREEDY, max_draft_tokens=7),
    "guided and speculative": Kind(GUIDED, max_draft_tokens=7),
    "four choices and guided": Kind(GUIDED, num_choices=4),
    "speculative with penalties and min_tokens": Kind(replace(SHAPED, min_tokens=9), max_draft_tokens=7),
}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def loaded_as(role: str, path: Path) -> LoadedModel:
    return load_tiny(path, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, role=role)


class Pair:
    """A prefill and a decode worker, of which either may be put in its place anew."""

    def __init__(self, path: Path) -> None:
        self.prefill, self.decode = loaded_as("prefill", path), loaded_as("decode", path)
        self.is_shipped = False
        self.kills_prefill = False
        self.num_accepted = 0  # drafts
        self.bench = Bench()

    def start(self, num_blocks: int = NUM_BLOCKS, max_num_seqs: int = 64, max_draft_tokens: int = 0) -> None:
        """A new decode worker."""
        self.bench = _new_bench(num_blocks, max_num_seqs, max_draft_tokens)

    def ask(self, work: Work) -> None:
        """Reserve, when there is room, and prefill."""
        local = 0 if self.is_shipped else 1000
        self.bench.reserve(work, local)
        if isinstance(self.bench.sent[-1], Refused):
            self.run()
            self.bench.reserve(work, local)
        if self.is_shipped:
            name = work.attempt_id.request_id
            if self.kills_prefill:
                self.bench.lose_transfer(name)
            self._ship(work, prefill_try=int(self.kills_prefill))

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        while self.bench.plan is not None and not until():
            result = _step(self.bench, self.decode)
            self.num_accepted += sum(len(run) - 1 for row in result.results for run in row.runs)

    def _ship(self, work: Work, prefill_try: int) -> None:
        """The prompt is computed in the other cache; what is missing of its KV, and the first tokens, go over."""
        prefill = _new_bench(NUM_BLOCKS, 64, 0)
        prefill.reserve(work, local=1000)
        tokens: tuple[SampledToken, ...] = ()
        while not tokens:
            assert prefill.plan is not None
            (sequence,) = prefill.plan.sequences
            tokens = _step(prefill, self.prefill).results[0].tokens
        self._copy(work, sequence.block_tables)
        first = tuple(FirstToken(choice, token) for choice, token in zip(work.choices, tokens, strict=True))
        self.bench.handle(FinishAnnounced(PREFILL, TransferId(work.attempt_id, prefill_try), 4, first))

    def _copy(self, work: Work, source_tables: tuple[tuple[int, ...], ...]) -> None:
        expected = self.bench.receiver.expected[work.attempt_id]
        place = expected.first_token // BLOCK_SIZE
        for group, (source, target) in enumerate(zip(source_tables, expected.block_tables, strict=True)):
            num_blocks = len(target)
            planes = zip(self.prefill.cache.planes[group], self.decode.cache.planes[group], strict=True)
            for theirs, ours in planes:
                ours[:, list(target[place:])] = theirs[:, list(source[place:num_blocks])]


def _new_bench(num_blocks: int, max_num_seqs: int, max_draft_tokens: int) -> Bench:
    groups = [PoolGroup(BlockPool(num_blocks, BLOCK_SIZE))]
    sizes = {"max_num_seqs": max_num_seqs, "max_num_waiting": 64, "max_draft_tokens": max_draft_tokens}
    return Bench(groups=groups, **sizes)


def _step(bench: Bench, loaded: LoadedModel) -> StepResult:
    plan, bench.plan = bench.plan, None
    assert plan is not None
    result = replace(loaded.runner.run(plan), duration_s=0.01)
    bench.handle(StepFinished(result))
    return result


@pytest.fixture(scope="module")
def pair(model_path: Path) -> Pair:
    return Pair(model_path)


@cache
def expected(path: Path, prompt: tuple[int, ...], kind: str) -> list[list[SampledToken]]:
    params, choices = KINDS[kind].params, range(KINDS[kind].num_choices)
    if params.num_beams:
        return [[SampledToken(token_id) for token_id in found] for found in beams(path, prompt, params, len(choices))]
    return generate_tokens(path, prompt, params, choices)


def works(kind: str, prompts: list[tuple[int, ...]]) -> list[Work]:
    choices = tuple(range(KINDS[kind].num_choices))
    return [job(f"r{n}", prompt, sampling=KINDS[kind].params, choices=choices) for n, prompt in enumerate(prompts)]


def alone(pair: Pair, kind: str, **sizes: int) -> list[Work]:
    pair.start(max_draft_tokens=KINDS[kind].max_draft_tokens, **sizes)
    asked = works(kind, PROMPTS[:1])
    pair.ask(asked[0])
    pair.run()
    return asked


def full_batch(pair: Pair, kind: str, **sizes: int) -> list[Work]:
    """Three requests and no more places than for two sequences."""
    pair.start(max_draft_tokens=KINDS[kind].max_draft_tokens, **{"max_num_seqs": 2, **sizes})
    asked = works(kind, PROMPTS)
    for work in asked:
        pair.ask(work)
    pair.run()
    return asked


def after_preemption(pair: Pair, kind: str) -> list[Work]:
    """The last two of the prompts fit together, their outputs do not."""
    asked = works(kind, PROMPTS)[1:]
    pair.start(num_blocks=17, max_draft_tokens=KINDS[kind].max_draft_tokens)
    for work in asked:
        pair.ask(work)
    pair.run()
    assert pair.bench.role.state.scheduler.num_preemptions > 0
    return asked


def decode_worker_killed(pair: Pair, kind: str) -> list[Work]:
    """Some tokens of every choice are delivered; another worker goes on, as the router asks. Of beams none are."""
    pair.start(max_draft_tokens=KINDS[kind].max_draft_tokens)
    (work,) = works(kind, PROMPTS[:1])
    pair.ask(work)
    if KINDS[kind].params.num_beams:
        steps = iter(range(KILLED_AT))
        pair.run(until=lambda: next(steps, None) is None)
        assert pair.bench.plan is not None
        assert not any(delivered(pair, work, choice) for choice in work.choices)
        return alone(pair, kind)
    pair.run(until=lambda: all(len(delivered(pair, work, c)) >= KILLED_AT for c in work.choices))
    first = {choice: delivered(pair, work, choice)[:KILLED_AT] for choice in work.choices}
    pair.start(max_draft_tokens=KINDS[kind].max_draft_tokens)
    for choice, tokens in first.items():
        token_ids = work.token_ids + tuple(token.token_id for token in tokens)
        pair.ask(replace(work, token_ids=token_ids, choices=(choice,)))
        pair.run()
    _check(pair, work, first)
    return [work]


def prefill_worker_killed(pair: Pair, kind: str) -> list[Work]:
    pair.kills_prefill = True
    try:
        return alone(pair, kind)
    finally:
        pair.kills_prefill = False


def delivered(pair: Pair, work: Work, choice: int) -> list[SampledToken]:
    events = pair.bench.events(work.attempt_id.request_id)
    return [event.token for event in events if event.choice_idx == choice]


def _check(pair: Pair, work: Work, first: dict[int, list[SampledToken]]) -> None:
    """The new worker goes on from where the client is."""
    for choice, tokens in first.items():
        events = [event for event in pair.bench.events(work.attempt_id.request_id) if event.choice_idx == choice]
        assert events[0].position == len(tokens) == KILLED_AT


CIRCUMSTANCES: dict[str, Any] = {
    "alone": alone,
    "full batch": full_batch,
    "after preemption": after_preemption,
    "decode worker killed": decode_worker_killed,
    "prefill worker killed": prefill_worker_killed,
}
CELLS = [
    pytest.param(way, name, id=f"{way}-{name}")
    for way in ("local", "shipped")
    for name in CIRCUMSTANCES
    if (way, name) != ("local", "prefill worker killed")  # there is none
]


@pytest.mark.parametrize(("way", "circumstance"), CELLS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_are_those_of_one_process(
    pair: Pair, model_path: Path, kind: str, way: str, circumstance: str
) -> None:
    pair.is_shipped = way == "shipped"
    for work in CIRCUMSTANCES[circumstance](pair, kind):
        prompt = work.token_ids[: work.num_prompt_tokens]
        for choice, tokens in enumerate(expected(model_path, prompt, kind)):
            ours = delivered(pair, work, choice)
            skipped = KILLED_AT if circumstance == "decode worker killed" and not work.sampling.num_beams else 0
            assert [token.token_id for token in ours] == [token.token_id for token in tokens[skipped:]], (kind, choice)
            if work.sampling.num_logprobs is not None:
                for token, theirs in zip(ours, tokens[skipped:], strict=True):
                    assert token.logprob == pytest.approx(theirs.logprob, abs=1e-4)
    assert pair.bench.counts() == (0, 0)


@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if kind.max_draft_tokens])
def test_drafts_are_accepted_in_these_requests(pair: Pair, kind: str) -> None:
    pair.is_shipped, pair.num_accepted = False, 0
    full_batch(pair, kind)
    assert pair.num_accepted > 0
