"""Which tokens may come next under a grammar, derived from the grammar and the output so far. Owns matchers.

A matcher stands behind the tokens that it has seen. One that stands a few tokens behind goes on, which is what a
running sequence needs; without one (a replay, a fork, a preempted sequence) a new matcher reads the whole output.
"""

import json
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from common.guided.grammar import LIMITS

MAX_MATCHERS = 1024
MAX_COMPILED = 64
MAX_RUN = 64  # tokens that a running sequence goes on by in one step
TokenIds = tuple[int, ...]


class GrammarFailed(Exception):
    """A grammar that goes no further at this output; the message says why."""


def guided_tokenizer(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """`vocab_size` is that of the logits. Half a second for 50,000 tokens."""
    return LLTokenizer(tokenizer.to_str(), n_vocab=vocab_size, eos_token=list(eos_token_ids))


class Masks:
    """One worker's masks. Not thread-safe: called from one thread at a time."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._matchers: OrderedDict[tuple[str, TokenIds], LLMatcher] = OrderedDict()

    def allowed(self, grammar: str, output: TokenIds) -> npt.NDArray[np.bool_]:
        """[vocab_size]: the tokens that may follow `output`. Raises GrammarFailed where there is none."""
        return self._mask(self._matcher(grammar, output))

    def allowed_along(self, grammar: str, output: TokenIds, drafts: TokenIds) -> list[npt.NDArray[np.bool_]]:
        """`allowed` after `output` and after each draft, as far as the drafts fit and something may follow them.

        The matcher is rolled back: it stands behind `output` again.
        """
        matcher = self._matcher(grammar, output)
        masks = [self._mask(matcher)]
        for draft in drafts:
            if matcher.is_stopped() or not masks[-1][draft] or not matcher.consume_token(draft):
                break
            try:
                masks.append(self._mask(matcher))
            except GrammarFailed:
                break
        # One that has reached the end does not come back from it as it was: the next step reads the output anew.
        if drafts and (matcher.is_stopped() or not matcher.rollback(len(masks) - 1)):
            del self._matchers[grammar, output]
        return masks

    def _mask(self, matcher: LLMatcher) -> npt.NDArray[np.bool_]:
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        if matcher.is_error():
            raise GrammarFailed(_reason(matcher))
        allowed = np.unpackbits(bits, bitorder="little")[: self._tokenizer.vocab_size].view(np.bool_)
        if not allowed.any():
            raise GrammarFailed("no token fits the grammar here")
        return allowed

    def _matcher(self, grammar: str, output: TokenIds) -> LLMatcher:
        """The one that has seen exactly `output`."""
        matcher, num_seen = self._nearest(grammar, output)
        if num_seen < len(output):
            matcher.consume_tokens(list(output[num_seen:]))
        if matcher.is_error():
            raise GrammarFailed(_reason(matcher))
        self._matchers[grammar, output] = matcher
        if len(self._matchers) > MAX_MATCHERS:
            self._matchers.popitem(last=False)
        return matcher

    def _nearest(self, grammar: str, output: TokenIds) -> tuple[LLMatcher, int]:
        """The matcher that lacks the fewest of the last tokens, taken out, and how many tokens it has seen."""
        for num_seen in range(len(output), max(-1, len(output) - MAX_RUN - 1), -1):
            matcher = self._matchers.pop((grammar, output[:num_seen]), None)
            if matcher is not None:
                return matcher, num_seen
        return self._new_matcher(grammar), 0

    def _new_matcher(self, grammar: str) -> LLMatcher:
        """A copy of one that is compiled."""
        compiled = self._compiled.pop(grammar, None)
        if compiled is None:
            compiled = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        self._compiled[grammar] = compiled
        if len(self._compiled) > MAX_COMPILED:
            self._compiled.popitem(last=False)
        return compiled.deep_copy()


def _reason(matcher: LLMatcher) -> str:
    """Without the grammar, which may be long, and the output, which is private."""
    return json.dumps(matcher.get_error().strip().split("\n")[0][:200])
