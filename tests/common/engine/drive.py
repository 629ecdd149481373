"""Drives a runner through whole generations, as a scheduler would: chunked prefill, then one batch of all."""

from dataclasses import dataclass, field

from common.engine.contract.executor import Runner
from common.engine.contract.plan import SampleSpec, ScheduledSequence, SequenceResult, StepPlan
from common.values.request import SampledToken, SamplingParams


@dataclass(slots=True)
class Generation:
    """One choice of one prompt, in blocks of its own: the same numbers in all groups of layers."""

    prompt: list[int]
    params: SamplingParams
    block_table: tuple[int, ...]
    choice_idx: int = 0
    tokens: list[SampledToken] = field(default_factory=list)
    num_done: int = 0  # tokens whose KV is written
    num_groups: int = 1
    adapter: str = ""

    @property
    def token_ids(self) -> list[int]:
        return self.prompt + self.output

    @property
    def output(self) -> list[int]:
        return [token.token_id for token in self.tokens]

    @property
    def has_ended(self) -> bool:
        return bool(self.tokens) and self.params.finish_reason(self.output[-1], len(self.tokens)) is not None

    def schedule(self, sequence_id: int, budget: int) -> ScheduledSequence:
        """The next run of tokens, with a sample when it reaches the end."""
        new = self.token_ids[self.num_done : self.num_done + budget]
        reaches_end = self.num_done + len(new) == len(self.token_ids)
        history = tuple(self.token_ids) if self.params.has_penalties else ()
        spec = SampleSpec(self.choice_idx, len(self.tokens), self.params, len(self.prompt), history)
        samples = (spec,) if reaches_end else ()
        tables = (self.block_table,) * self.num_groups
        scheduled = ScheduledSequence(sequence_id, tuple(new), self.num_done, tables, samples, adapter=self.adapter)
        self.num_done += len(new)
        return scheduled

    def accept(self, result: SequenceResult) -> None:
        assert result.error is None, result.error
        (run,) = result.runs
        self.tokens.extend(run)


def blocks_for(lens: list[int], block_size: int, num_blocks: int) -> list[tuple[int, ...]]:
    """Tables of the given capacities, their blocks interleaved and descending: never in order by accident."""
    counts = [-(-length // block_size) for length in lens]
    assert sum(counts) <= num_blocks, f"{sum(counts)} blocks needed, {num_blocks} there"
    free = list(range(num_blocks))
    tables: list[list[int]] = [[] for _ in lens]
    for round_idx in range(max(counts)):
        for table, count in zip(tables, counts, strict=True):
            if round_idx < count:
                table.append(free.pop())
    return [tuple(table) for table in tables]


def run_all(runner: Runner, generations: list[Generation], chunk: int) -> int:
    """All together, each step taking up to `chunk` tokens of every unfinished one. Returns the number of steps."""
    step_id = 0
    while running := {idx: gen for idx, gen in enumerate(generations) if not gen.has_ended}:
        plan = StepPlan(step_id, tuple(gen.schedule(idx, chunk) for idx, gen in running.items()))
        for result in runner.run(plan).results:
            running[result.sequence_id].accept(result)
        step_id += 1
    return step_id
