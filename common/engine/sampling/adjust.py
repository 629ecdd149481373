"""What is done to a row of logits before a token is picked: bias, penalties, forbidden tokens."""

from collections import Counter
from collections.abc import Iterable, Mapping

import torch

from common.engine.contract.plan import SampleSpec
from common.values.request import SamplingParams

FORBIDDEN = float("-inf")


def needs_adjustment(spec: SampleSpec) -> bool:
    params = spec.params
    return bool(spec.banned_token_ids or params.logit_bias or params.allowed_token_ids) or params.has_penalties


def adjust(logits: torch.Tensor, spec: SampleSpec) -> torch.Tensor:
    """A new row [vocab_size]: repetition penalty, presence and frequency penalty, bias, then forbidden tokens.

    The repetition penalty counts prompt and output (as in Hugging Face), the other two the output only (as in
    OpenAI's API).
    """
    logits = logits.clone()
    params = spec.params
    if params.has_penalties:
        _penalize(logits, spec)
    if params.logit_bias:
        ids, biases = zip(*params.logit_bias, strict=True)
        logits.index_add_(0, _indices(ids, logits), torch.tensor(biases, dtype=logits.dtype, device=logits.device))
    if params.allowed_token_ids:
        allowed = _indices(params.allowed_token_ids, logits)
        logits = torch.full_like(logits, FORBIDDEN).index_copy_(0, allowed, logits[allowed])
    if spec.banned_token_ids:
        logits.index_fill_(0, _indices(spec.banned_token_ids, logits), FORBIDDEN)
    return logits


def _penalize(logits: torch.Tensor, spec: SampleSpec) -> None:
    params = spec.params
    if params.repetition_penalty != 1.0 and spec.token_ids:
        seen = _indices(sorted(set(spec.token_ids)), logits)
        values = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    counts = Counter(spec.token_ids[spec.num_prompt_tokens :])
    if taken_off := penalty_of(counts, params):
        penalties = torch.tensor(list(taken_off.values()), dtype=logits.dtype, device=logits.device)
        logits.index_add_(0, _indices(taken_off, logits), penalties, alpha=-1)


def penalty_of(counts: Mapping[int, int], params: SamplingParams) -> dict[int, float]:
    """What presence and frequency penalty take off each token that was generated so often; {} without penalties."""
    if not counts or not (params.presence_penalty or params.frequency_penalty):
        return {}
    num_times = torch.tensor(list(counts.values()), dtype=torch.float32)
    penalties = params.presence_penalty + params.frequency_penalty * num_times
    return dict(zip(counts, penalties.tolist(), strict=True))


def _indices(token_ids: Iterable[int], logits: torch.Tensor) -> torch.Tensor:
    return torch.tensor(list(token_ids), dtype=torch.int64, device=logits.device)
