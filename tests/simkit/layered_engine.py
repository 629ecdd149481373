"""A model without floating point, layer by layer: a row that is not what it should be changes the output.

The KV row of (layer, position) is a number chained over layer and tokens up to that position. It is written when that
layer is computed, not before, so a row that is shipped too early is an old one. The next token is a function of all
rows of all layers, read through the block table: a wrong block, layer, position or token names itself by a wrong text.
"""

from collections.abc import Sequence

from common.engine.contract.plan import SampleSpec, ScheduledSequence, SequenceResult, StepPlan, StepResult
from common.values.request import PromptLogprobs, SampledToken, SamplingParams
from kvtransfer.events import Chunk

NUM_LAYERS = 2
VOCAB_SIZE = 50
UNWRITTEN = -1

Rows = list[list[int]]  # [layer][position]
Payload = list[list[int]]  # [layer][token] of one chunk


def rows_of(token_ids: Sequence[int]) -> Rows:
    """The KV of every layer and position of `token_ids`."""
    rows: Rows = []
    for layer in range(NUM_LAYERS):
        values: list[int] = []
        for token_id in token_ids:
            values.append(_chain(values[-1] if values else layer, token_id))
        rows.append(values)
    return rows


def expected_output(prompt: Sequence[int], params: SamplingParams, choice_idx: int) -> list[int]:
    """The tokens of one choice, from the tokens alone: no blocks, no batches, no handoff."""
    tokens, output = list(prompt), list[int]()
    rows = rows_of(tokens)
    while True:
        output.append(_draw(rows, params.seed, choice_idx, len(output)))
        if params.finish_reason(output[-1], len(output)) is not None:
            return output
        tokens.append(output[-1])
        for layer, values in enumerate(rows):
            values.append(_chain(values[-1] if values else layer, tokens[-1]))


def expected_logprobs(prompt: Sequence[int]) -> list[float]:
    """Of each token of a prompt but the first, from the tokens alone."""
    return [_score(rows_of(prompt[:position]), prompt[position]) for position in range(1, len(prompt))]


class LayeredEngine:
    """One worker's KV memory and compute. Never cleared, as a real cache is not."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._slots: list[dict[tuple[int, int], int]] = [{} for _ in range(NUM_LAYERS)]

    def begin(self, plan: StepPlan) -> None:
        """Copy-on-write, as one: every source is read before any target is written."""
        for slots in self._slots:
            old = dict(slots) if plan.block_copies else {}
            for _, source, target in plan.block_copies:
                for offset in range(self._block_size):
                    slots[target, offset] = old.get((source, offset), UNWRITTEN)

    def compute_layer(self, plan: StepPlan, layer: int) -> None:
        """Write one layer's rows of all scheduled tokens."""
        for sequence in plan.sequences:
            for position, token_id in enumerate(sequence.token_ids, sequence.start):
                previous = self.read(layer, sequence.block_tables[0], position - 1) if position else layer
                self.write(layer, sequence.block_tables[0], position, _chain(previous, token_id))

    def finish(self, plan: StepPlan, duration_s: float) -> StepResult:
        """Sample and score what was asked for."""
        results = tuple(self._result(each) for each in plan.sequences if each.samples or each.scores)
        return StepResult(plan.step_id, results, duration_s)

    def read(self, layer: int, block_table: Sequence[int], position: int) -> int:
        return self._slots[layer].get(self._slot(block_table, position), UNWRITTEN)

    def write(self, layer: int, block_table: Sequence[int], position: int, value: int) -> None:
        self._slots[layer][self._slot(block_table, position)] = value

    def _slot(self, block_table: Sequence[int], position: int) -> tuple[int, int]:
        return block_table[position // self._block_size], position % self._block_size

    def _result(self, sequence: ScheduledSequence) -> SequenceResult:
        rows = self._rows(sequence, sequence.start + len(sequence.token_ids))
        runs = tuple((_sampled(rows, spec),) for spec in sequence.samples)
        return SequenceResult(sequence.sequence_id, runs, prompt_logprobs=self._scores(sequence))

    def _scores(self, sequence: ScheduledSequence) -> PromptLogprobs | None:
        if (spec := sequence.scores) is None:
            return None
        assert sequence.start < spec.start, "scored by a row that is not computed in this step"
        logprobs = [_score(self._rows(sequence, at), token) for at, token in enumerate(spec.token_ids, spec.start)]
        return PromptLogprobs(spec.start, tuple(logprobs), (1,) * len(logprobs))

    def _rows(self, sequence: ScheduledSequence, end: int) -> Rows:
        table = sequence.block_tables[0]
        return [[self.read(layer, table, position) for position in range(end)] for layer in range(NUM_LAYERS)]


def read_chunk(engine: LayeredEngine, chunk: Chunk, table: tuple[int, ...]) -> Payload:
    """What a pack reads."""
    layers = range(chunk.layer_start, chunk.layer_end)
    return [
        [engine.read(layer, table, token) for token in range(chunk.token_start, chunk.token_end)] for layer in layers
    ]


def write_chunk(engine: LayeredEngine, chunk: Chunk, table: tuple[int, ...], payload: Payload) -> None:
    """What a write does."""
    for layer, values in enumerate(payload, chunk.layer_start):
        for token, value in enumerate(values, chunk.token_start):
            engine.write(layer, table, token, value)


def _sampled(rows: Rows, spec: SampleSpec) -> SampledToken:
    return SampledToken(_draw(rows, spec.params.seed, spec.choice_idx, spec.position))


def _score(rows: Rows, token_id: int) -> float:
    return -(hash((token_id, *map(tuple, rows))) % 1000) / 8


def _draw(rows: Rows, seed: int, choice_idx: int, position: int) -> int:
    return hash((seed, choice_idx, position, *map(tuple, rows))) % VOCAB_SIZE


def _chain(previous: int, token_id: int) -> int:
    return hash((previous, token_id, 17))
