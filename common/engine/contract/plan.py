"""What a scheduler asks of the model in one step, and what comes back. Pure: no torch.

The scheduler decides *what* (which tokens, which blocks, which samples); the runner decides how.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from common.values.request import SampledToken, SamplingParams, Work


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """Draw one token from the logits of a sequence's last scheduled token.

    `position` is the output position of the token to draw (noise and min_tokens depend on it).
    `token_ids` (prompt and output so far) is set only when the params have penalties.
    `banned_token_ids` may not be drawn.
    """

    choice_idx: int
    position: int
    params: SamplingParams
    num_prompt_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    banned_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """A run of consecutive tokens of one sequence.

    `token_ids[i]` stands at position `start + i`; the KV of positions < `start` is in place.
    `block_tables` has one table per group of the model's `KVSpec`: its entry j is the block of positions
    [j * block_size, (j + 1) * block_size), and it covers every position up to `start + len(token_ids)`.
    No samples = a prefill chunk that does not end the prompt.
    """

    sequence_id: int
    token_ids: tuple[int, ...]
    start: int
    block_tables: tuple[tuple[int, ...], ...]
    samples: tuple[SampleSpec, ...] = ()

    @property
    def block_table(self) -> tuple[int, ...]:
        """That of a model whose layers are all in one group."""
        (block_table,) = self.block_tables
        return block_table


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass. `block_copies` (source, target) are done first: copy-on-write.

    Every source is read before a target is written, and no target is listed twice.
    """

    step_id: int
    sequences: tuple[ScheduledSequence, ...]
    block_copies: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(sequence.token_ids) for sequence in self.sequences)


@dataclass(frozen=True, slots=True)
class SequenceResult:
    """Samples in the order of the spec. `error` is set, and `tokens` empty, when the row was not finite."""

    sequence_id: int
    tokens: tuple[SampledToken, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """`results` has one entry per scheduled sequence that had samples, in the plan's order."""

    step_id: int
    results: tuple[SequenceResult, ...]
    duration_s: float


def sample_spec(work: Work, choice_idx: int, token_ids: Sequence[int]) -> SampleSpec:
    """How to draw the token that follows `token_ids` (prompt and output so far) of one choice of `work`."""
    params = work.sampling
    position = len(token_ids) - work.num_prompt_tokens
    return SampleSpec(
        choice_idx=choice_idx,
        position=position,
        params=params,
        num_prompt_tokens=work.num_prompt_tokens,
        token_ids=tuple(token_ids) if params.has_penalties else (),
        banned_token_ids=params.banned_token_ids(token_ids, position),
    )
