"""A model without floating point: a wrong block, position or token anywhere changes the output.

The "KV" of position p is a number chained over the tokens up to p. The next token is a function of the numbers of all
positions, read through the block table, and of what a SampleSpec says. `expected_output` computes the same from the
tokens alone, with no blocks at all.
"""

from collections.abc import Sequence

from common.engine.contract.plan import SampleSpec, ScheduledSequence, SequenceResult, StepPlan, StepResult
from common.values.request import PromptLogprobs, SampledToken, Work

VOCAB_SIZE = 50


def chain(previous: int, token_id: int) -> int:
    return hash((previous, token_id, 17))


def contents(token_ids: Sequence[int]) -> list[int]:
    """The KV of every position of `token_ids`."""
    values: list[int] = []
    for token_id in token_ids:
        values.append(chain(values[-1] if values else 0, token_id))
    return values


def draw(values: Sequence[int], spec: SampleSpec) -> int:
    token_id = hash((*values, spec.params.seed, spec.choice_idx, spec.position, *spec.token_ids)) % VOCAB_SIZE
    while token_id in spec.banned_token_ids:
        token_id = (token_id + 1) % VOCAB_SIZE
    return token_id


def expected_output(work: Work, choice_idx: int) -> list[int]:
    """The tokens of one choice from `work.token_ids` on, to its finish."""
    tokens = list(work.token_ids)
    output: list[int] = []
    params = work.sampling
    while True:
        position = len(tokens) - work.num_prompt_tokens
        spec = SampleSpec(
            choice_idx,
            position,
            params,
            token_ids=tuple(tokens) if params.has_penalties else (),
            banned_token_ids=params.banned_token_ids(tokens, position),
        )
        output.append(draw(contents(tokens), spec))
        tokens.append(output[-1])
        if params.finish_reason(output[-1], position + 1) is not None:
            return output


def expected_logprobs(prompt: Sequence[int]) -> list[float]:
    """Of each token of a prompt but the first."""
    values = contents(prompt)
    return [score(values[:position], prompt[position]) for position in range(1, len(prompt))]


def score(values: Sequence[int], token_id: int) -> float:
    return -(hash((token_id, *values)) % 1000) / 8


class FakeKv:
    """Slots of a paged cache: (block, offset) -> number. Never cleared, as a real cache is not."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._slots: dict[tuple[int, int], int] = {}

    def read(self, block_table: Sequence[int], position: int) -> int:
        return self._slots.get((block_table[position // self.block_size], position % self.block_size), -1)

    def write(self, block_table: Sequence[int], position: int, value: int) -> None:
        self._slots[block_table[position // self.block_size], position % self.block_size] = value

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        assert len({target for _, target in pairs}) == len(pairs), "a block is the target of two copies"
        old = dict(self._slots)
        for source, target in pairs:
            for offset in range(self.block_size):
                if (source, offset) in old:
                    self._slots[target, offset] = old[source, offset]


class FakeRunner:
    """Executes plans on a FakeKv per group. `nan_sequences` get an error instead of tokens.

    The first group has no window. What a token reads in the window of another must be what is there in the first.
    """

    def __init__(self, block_size: int, windows: Sequence[int] = (0,)) -> None:
        assert windows[0] == 0
        self.windows = tuple(windows)
        self.kvs = [FakeKv(block_size) for _ in windows]
        self.kv = self.kvs[0]
        self.nan_sequences: set[int] = set()
        self.num_steps = 0
        self.num_copies = 0

    def run(self, plan: StepPlan) -> StepResult:
        self.num_steps += 1
        self.num_copies += len(plan.block_copies)
        for idx, kv in enumerate(self.kvs):
            kv.copy_blocks([(source, target) for group, source, target in plan.block_copies if group == idx])
        _check_no_slot_is_written_twice(plan, self.kv.block_size)
        results = []
        for sequence in plan.sequences:
            self._compute(sequence)
        for sequence in plan.sequences:
            if sequence.samples or sequence.scores:
                results.append(self._sample(sequence))
        return StepResult(plan.step_id, tuple(results), duration_s=1e-3 * plan.num_tokens)

    def _compute(self, sequence: ScheduledSequence) -> None:
        tables = sequence.block_tables
        for position, token_id in enumerate(sequence.new_token_ids, sequence.start):
            previous = self.kv.read(tables[0], position - 1) if position > 0 else 0
            for idx, window in enumerate(self.windows):
                for read in range(max(0, position - window + 1), position if window else 0):
                    assert self.kvs[idx].read(tables[idx], read) == self.kv.read(tables[0], read), f"group {idx}"
                self.kvs[idx].write(tables[idx], position, chain(previous, token_id))

    def _sample(self, sequence: ScheduledSequence) -> SequenceResult:
        if sequence.sequence_id in self.nan_sequences:
            return SequenceResult(sequence.sequence_id, error="logits are not finite")
        num_tokens = sequence.start + len(sequence.token_ids)
        values = [self.kv.read(sequence.block_tables[0], position) for position in range(num_tokens)]
        drafts = sequence.draft_token_ids
        if not drafts:
            runs = tuple((SampledToken(draw(values, spec)),) for spec in sequence.samples)
            return SequenceResult(sequence.sequence_id, runs, prompt_logprobs=_scores(sequence, values))
        run = [draw(values, sequence.samples[0])]
        for position, (draft, spec) in enumerate(zip(drafts, sequence.samples[1:], strict=True), num_tokens):
            if run[-1] != draft:
                break
            values.append(self.kv.read(sequence.block_tables[0], position))
            run.append(draw(values, spec))
        return SequenceResult(sequence.sequence_id, (tuple(map(SampledToken, run)),))


def _scores(sequence: ScheduledSequence, values: Sequence[int]) -> PromptLogprobs | None:
    if (spec := sequence.scores) is None:
        return None
    assert sequence.start < spec.start, "scored by a row that is not computed in this step"
    logprobs = tuple(score(values[:at], token_id) for at, token_id in enumerate(spec.token_ids, spec.start))
    return PromptLogprobs(spec.start, logprobs, (1,) * len(logprobs))


def _check_no_slot_is_written_twice(plan: StepPlan, block_size: int) -> None:
    written: set[tuple[int, int, int]] = set()
    for sequence in plan.sequences:
        assert sequence.token_ids, "a sequence without tokens"
        for idx, table in enumerate(sequence.block_tables):
            assert (sequence.start + sequence.num_new - 1) // block_size < len(table)
            for position in range(sequence.start, sequence.start + sequence.num_new):
                slot = idx, table[position // block_size], position % block_size
                assert slot not in written, f"two sequences write slot {slot}"
                written.add(slot)
