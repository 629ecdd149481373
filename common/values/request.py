"""A request as the workers see it: token ids, how to sample, when to stop. Pure: no IO, no text."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from common.values.ids import AttemptId


class FinishReason(StrEnum):
    """Why a choice ended; the values are OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


class EarlyStopping(StrEnum):
    """When a beam search has seen enough; transformers' words."""

    FALSE = "false"
    TRUE = "true"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to pick a token and when a choice ends. Ranges are checked once, by the router's validator.

    `seed` is always set (the router draws one when the client gives none) and noise depends only on
    (seed, choice, position, token id), so every worker and every replay draws the same.
    `stop_token_ids` already holds the model's EOS ids unless the client asked to ignore them.
    """

    seed: int
    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()  # empty = all
    num_logprobs: int | None = None  # None = no logprobs; 0 = of the sampled token only
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()  # runs of output tokens that may not be; none is empty
    grammar: str = ""  # that the output must follow, see `common.guided`; empty = none
    num_beams: int = 0  # of a beam search, which draws nothing; 0 = none
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.FALSE

    @property
    def num_candidates(self) -> int:
        """Of each beam: so many that `num_beams` go on whichever end."""
        return max(2, 1 + len(self.stop_token_ids)) * self.num_beams

    @property
    def num_logprobs_needed(self) -> int | None:
        """As `num_logprobs`: for the client or for a beam search."""
        return max(self.num_logprobs or 0, self.num_candidates) if self.num_beams else self.num_logprobs

    @property
    def has_penalties(self) -> bool:
        """True when sampling depends on the tokens so far."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def needs_history(self) -> bool:
        """True when the tokens so far decide which tokens may be drawn, or how likely they are."""
        return self.has_penalties or bool(self.grammar)

    def banned_token_ids(self, token_ids: Sequence[int], num_output_tokens: int) -> tuple[int, ...]:
        """Tokens that may not follow `token_ids`, of which the last are output: they end it too soon, or a bad word."""
        too_soon = self.stop_token_ids if num_output_tokens < self.min_tokens else ()
        if not self.bad_words:
            return too_soon
        begun = [word for word in self.bad_words if len(word) <= num_output_tokens + 1]
        return (*too_soon, *[word[-1] for word in begun if _ends_with(token_ids, word[:-1])])

    def finish_reason(self, token_id: int, num_output_tokens: int) -> FinishReason | None:
        """Why the choice ends with `token_id` as its `num_output_tokens`-th token (1-based), or None."""
        if token_id in self.stop_token_ids and num_output_tokens >= self.min_tokens:
            return FinishReason.STOP
        if num_output_tokens >= self.max_tokens:
            return FinishReason.LENGTH
        return None


def _ends_with(token_ids: Sequence[int], end: Sequence[int]) -> bool:
    return tuple(token_ids[len(token_ids) - len(end) :]) == tuple(end)


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter: what its files hold, by a digest, and where every worker reads them. Empty = none."""

    digest: str = ""
    path: str = ""

    def __bool__(self) -> bool:
        return bool(self.digest)


NO_ADAPTER = Adapter()


@dataclass(frozen=True, slots=True)
class Work:
    """What one worker needs to know of an attempt.

    `token_ids` is the prompt plus the output tokens that the client already has (a replay), so
    `len(token_ids) - num_prompt_tokens` output tokens exist before the worker samples its first.
    `choices` are the choice indices to generate; more than one only when no output exists yet.
    `cache_salt` separates tenants in the prefix cache. `deadline_s` is the time left when sent. Waiting work is shared
    out fairly between `tenant`s, an opaque word; empty without API keys. `num_prompt_logprobs`: how many of the most
    likely tokens are told for each place of the prompt, besides its own; None = nothing is (any more). All tokens are
    computed with the `adapter`.
    """

    attempt_id: AttemptId
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    choices: tuple[int, ...] = (0,)
    priority: int = 0  # lower runs earlier
    cache_salt: bytes = b""
    deadline_s: float = 600.0
    tenant: str = ""
    num_prompt_logprobs: int | None = None
    adapter: Adapter = NO_ADAPTER

    @property
    def num_sequences(self) -> int:
        """That a decode worker computes at a time, at most."""
        return max(len(self.choices), self.sampling.num_beams)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens that exist already (0 unless this is a replay)."""
        return len(self.token_ids) - self.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Of consecutive prompt tokens from position `start` on, each given all before it; so `start` is at least 1.

    In columns, one entry per token. A rank is 1 + the number of more likely tokens. The most likely tokens of each
    place follow one another, best first, as many for each.
    """

    start: int
    logprobs: tuple[float, ...]
    ranks: tuple[int, ...]
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()

    @property
    def end(self) -> int:
        """The position after the last."""
        return self.start + len(self.logprobs)

    def top(self, position: int) -> tuple[tuple[int, float], ...]:
        """(token id, logprob) of the most likely tokens at a position, best first."""
        num_top = len(self.top_ids) // len(self.logprobs)
        part = slice((position - self.start) * num_top, (position - self.start + 1) * num_top)
        return tuple(zip(self.top_ids[part], self.top_logprobs[part], strict=True))

    def after(self, position: int) -> "PromptLogprobs":
        """Without those before `position`, which is one of its own."""
        num_gone = position - self.start
        num_top = len(self.top_ids) // len(self.logprobs)
        return PromptLogprobs(
            position,
            self.logprobs[num_gone:],
            self.ranks[num_gone:],
            self.top_ids[num_gone * num_top :],
            self.top_logprobs[num_gone * num_top :],
        )


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One token drawn from the model. `top` holds (token id, logprob), best first."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One sampled token on its way to the router. `position` is the 0-based output position."""

    choice_idx: int
    position: int
    token: SampledToken
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class ChunkTiming:
    """One prefill step of a request, in seconds since the worker received it."""

    start_s: float
    end_s: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class KvChunkTiming:
    """One chunk of KV in its place on the decode worker, `before_end_s` before all KV was."""

    before_end_s: float
    layer_start: int
    layer_end: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What must be equal before one worker may take another's KV (block size and layout may differ)."""

    fields: tuple[tuple[str, str], ...] = field(default=())

    def mismatches(self, other: "Fingerprint") -> list[str]:
        """One sentence per differing field, naming both values; empty when the two may pair."""
        ours, theirs = dict(self.fields), dict(other.fields)
        return [
            f"{name}: {ours.get(name)!r} here, {theirs.get(name)!r} there"
            for name in sorted(ours.keys() | theirs.keys())
            if ours.get(name) != theirs.get(name)
        ]
