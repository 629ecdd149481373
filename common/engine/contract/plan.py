"""What a scheduler asks of the model in one step, and what comes back. Pure: no torch.

The scheduler decides *what* (which tokens, which blocks, which samples); the runner decides how.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from common.values.request import PromptLogprobs, SampledToken, SamplingParams, Work


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """Draw one token from the logits of one scheduled token.

    `position` is the output position of the token to draw (noise and min_tokens depend on it).
    `token_ids` (prompt and output so far) is set only when the params need them: for penalties or a grammar.
    `banned_token_ids` may not be drawn.
    """

    choice_idx: int
    position: int
    params: SamplingParams
    num_prompt_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    banned_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ScoreSpec:
    """Tell the logprobs of `token_ids`, prompt tokens at `start` and after, each by the logits of the token before it.

    `num_top`: of so many of the most likely tokens besides.
    """

    start: int
    token_ids: tuple[int, ...]
    num_top: int


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """A run of consecutive tokens of one sequence.

    `token_ids[i]` stands at position `start + i`; the KV of positions < `start` is in place.
    `block_tables` has one table per group of the model's `KVSpec`: its entry j is the block of positions
    [j * block_size, (j + 1) * block_size), and it covers every position up to `start + num_new`. Behind a group's
    window it names any block: nothing is read there.
    `samples` are drawn from the last token's logits, one per choice; () = a prefill chunk that does not end the prompt.

    `draft_token_ids` are guesses at what follows, verified in the same pass: there is one choice then, and `samples`
    has one entry for the last token and one for each draft, as if all drafts before it were right. A draft is accepted
    exactly if it is the token that is drawn at its position, so the output is the same with and without drafts. KV of
    what is not accepted is written over by the next step.

    `adapter`: the digest of the adapter that its tokens are computed with, which the runner has; "" = none.

    `scores`: prompt tokens that are scored by the logits of the new tokens before them; never by a row that is sampled.
    """

    sequence_id: int
    token_ids: tuple[int, ...]
    start: int
    block_tables: tuple[tuple[int, ...], ...]
    samples: tuple[SampleSpec, ...] = ()
    draft_token_ids: tuple[int, ...] = ()
    scores: ScoreSpec | None = None
    adapter: str = ""

    def __post_init__(self) -> None:
        if self.draft_token_ids and len(self.samples) != 1 + len(self.draft_token_ids):
            raise ValueError(f"{len(self.samples)} samples for {len(self.draft_token_ids)} drafts")

    @property
    def new_token_ids(self) -> tuple[int, ...]:
        """All that is computed: the tokens from `start` on."""
        return self.token_ids + self.draft_token_ids

    @property
    def num_new(self) -> int:
        return len(self.token_ids) + len(self.draft_token_ids)

    @property
    def num_logits(self) -> int:
        """Rows of logits to sample from: of the last so many new tokens."""
        return 1 + len(self.draft_token_ids) if self.samples else 0

    @property
    def num_scored(self) -> int:
        """Rows of logits that score prompt tokens; they come before those to sample from."""
        return len(self.scores.token_ids) if self.scores is not None else 0

    @property
    def logit_rows(self) -> tuple[int, ...]:
        """The new tokens whose logits are wanted, counted from 0, ascending."""
        sampled = range(self.num_new - self.num_logits, self.num_new)
        if self.scores is None:
            return tuple(sampled)
        first = self.scores.start - 1 - self.start
        return (*range(first, first + self.num_scored), *sampled)

    @property
    def attended(self) -> "tuple[ScheduledSequence, ...]":
        """As attention sees it: each draft is a sequence of one new token that shares the blocks. Decode kernels take
        those, and round a row as they would without drafts; the KV of all is written before any is attended."""
        if not self.draft_token_ids:
            return (self,)
        parts = (self.token_ids, *((token_id,) for token_id in self.draft_token_ids))
        starts = (self.start, *range(self.start + len(self.token_ids), self.start + self.num_new))
        return tuple(
            ScheduledSequence(self.sequence_id, part, start, self.block_tables)
            for part, start in zip(parts, starts, strict=True)
        )


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass. `block_copies` (group, source, target) are done first: copy-on-write.

    Every source is read before a target is written, and no target is listed twice.
    """

    step_id: int
    sequences: tuple[ScheduledSequence, ...]
    block_copies: tuple[tuple[int, int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(sequence.num_new for sequence in self.sequences)


@dataclass(frozen=True, slots=True)
class SequenceResult:
    """What was drawn, and scored. `error` is set, and the rest empty, when a row was not finite.

    A run is what one choice goes on with: the accepted drafts and the token after them, so one token without drafts.
    It may reach beyond the choice's end, and it is shorter when the row after an accepted draft is not finite.
    """

    sequence_id: int
    runs: tuple[tuple[SampledToken, ...], ...] = ()  # per choice, in the order of the samples
    error: str | None = None
    prompt_logprobs: PromptLogprobs | None = None

    @property
    def tokens(self) -> tuple[SampledToken, ...]:
        """The first token of each choice: all there is without drafts."""
        return tuple(run[0] for run in self.runs)


@dataclass(frozen=True, slots=True)
class StepResult:
    """`results` has one entry per scheduled sequence that had samples or scores, in the plan's order."""

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
        token_ids=tuple(token_ids) if params.needs_history else (),
        banned_token_ids=params.banned_token_ids(token_ids, position),
    )


def draft_specs(
    work: Work, choice_idx: int, token_ids: Sequence[int], draft_token_ids: Sequence[int]
) -> tuple[SampleSpec, ...]:
    """The `samples` of a sequence with drafts: `sample_spec` after `token_ids`, and after each draft."""
    params = work.sampling
    first = len(token_ids) - work.num_prompt_tokens
    if not params.needs_history and not params.bad_words:  # then the position is all that differs
        return tuple(
            SampleSpec(choice_idx, at, params, work.num_prompt_tokens, (), params.banned_token_ids((), at))
            for at in range(first, first + len(draft_token_ids) + 1)
        )
    known = [*token_ids, *draft_token_ids]
    return tuple(sample_spec(work, choice_idx, known[:end]) for end in range(len(token_ids), len(known) + 1))
