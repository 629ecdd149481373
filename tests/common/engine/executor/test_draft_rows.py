"""Where the rows of drafts stand, and how they are drawn from."""

from dataclasses import replace

import pytest

from common.engine.contract.plan import ScheduledSequence, draft_specs, sample_spec
from common.engine.executor.runner import build_batches
from common.values.ids import AttemptId, RequestId
from common.values.request import SamplingParams, Work

PROMPT = [5, 77, 130, 9]
BLOCK_SIZE = 8
GREEDY = SamplingParams(seed=1, max_tokens=12, temperature=0.0)
PENALIZED = replace(GREEDY, presence_penalty=1.5, repetition_penalty=1.3)


def work_of(params: SamplingParams) -> Work:
    return Work(AttemptId(RequestId("a"), 0), tuple(PROMPT), len(PROMPT), params)


def test_drafts_are_rows_of_a_decode_step() -> None:
    """Attention sees sequences of one new token each, in the order of their tokens, and no prompt."""
    work, tokens, drafts = work_of(GREEDY), [*PROMPT, 7], (8, 9)
    samples = draft_specs(work, 0, tokens, drafts)
    sequence = ScheduledSequence(1, (7,), 4, ((5, 6),), samples, drafts)
    (batch,) = build_batches(list(sequence.attended), 1, BLOCK_SIZE)
    assert batch.max_query_len == 1
    assert batch.positions.tolist() == [4, 5, 6]
    assert batch.seq_lens.tolist() == [5, 6, 7]
    assert batch.slot_mapping.tolist() == [5 * BLOCK_SIZE + offset for offset in (4, 5, 6)]
    assert batch.block_tables.tolist() == [[5], [5], [5]]


@pytest.mark.parametrize("params", [GREEDY, PENALIZED, replace(GREEDY, bad_words=((7, 8),), min_tokens=4)])
def test_the_samples_of_drafts_are_those_of_the_tokens_one_by_one(params: SamplingParams) -> None:
    params = replace(params, stop_token_ids=(5,))
    work, drafts = work_of(params), (8, 9)
    one_by_one = [sample_spec(work, 0, (*PROMPT, 7, *drafts[:num])) for num in range(3)]
    assert list(draft_specs(work, 0, [*PROMPT, 7], drafts)) == one_by_one
