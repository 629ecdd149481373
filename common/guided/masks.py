"""Which tokens may come next under a grammar, derived from the grammar and the output so far. Owns matchers.

A matcher stands behind the tokens that it has seen. The one that stands one token behind goes on, which is what a
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
        matcher = self._matcher(grammar, output)
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        if matcher.is_error():
            raise GrammarFailed(_reason(matcher))
        allowed = np.unpackbits(bits, bitorder="little")[: self._tokenizer.vocab_size].view(np.bool_)
        if not allowed.any():
            raise GrammarFailed("no token fits the grammar here")
        return allowed

    def _matcher(self, grammar: str, output: TokenIds) -> LLMatcher:
        """The one that has seen exactly `output`."""
        key = (grammar, output)
        matcher = self._matchers.pop(key, None)
        if matcher is None and output and (matcher := self._matchers.pop((grammar, output[:-1]), None)) is not None:
            matcher.consume_token(output[-1])
        if matcher is None:
            matcher = self._new_matcher(grammar)
            matcher.consume_tokens(list(output))
        if matcher.is_error():
            raise GrammarFailed(_reason(matcher))
        self._matchers[key] = matcher
        if len(self._matchers) > MAX_MATCHERS:
            self._matchers.popitem(last=False)
        return matcher

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
