"""Logprobs of prompts: they are delivered before any token, whichever worker is heard first. Pure: no IO.

The worker that computes the prompt sends them ahead of its first tokens. The decode worker has the same first tokens,
may be heard before, and its tokens wait then. When who was to send the rest is gone, or sends tokens without it, only a
replay helps: the KV is in its place, and nobody would compute the prompt again.
"""

from common.values.messages import AttemptTokens, FirstTokens, HandoffReport, PromptScored
from router.core.request_state import AttemptPhase, Placed
from router.core.requests import Requests


def scored(requests: Requests, on: Placed, message: PromptScored) -> None:
    fresh = on.request.take_scores(message.scores)
    if fresh is not None:
        requests.deliver(on.request, fresh)


def is_too_early(requests: Requests, on: Placed, message: FirstTokens | HandoffReport | AttemptTokens) -> bool:
    """Whether a message must not be acted on now: it waits for the prompt's logprobs, or the attempt is replayed."""
    if not on.request.is_scoring:
        return False
    is_awaited = on.attempt.phase is AttemptPhase.PREFILLING and not on.attempt.has_lost_a_try
    if is_awaited and not isinstance(message, FirstTokens):
        on.attempt.early.append(message)
    else:
        requests.replay(on.request, [on.attempt], "logprobs of the prompt are missing")
    return True
