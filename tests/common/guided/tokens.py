"""Texts and tokens for tests of guided decoding, over a tokenizer of single bytes."""

import random

import numpy as np

from common.guided.masks import Masks, guided_tokenizer
from tests.router.text.tokenizers_for_tests import EOS_ID, byte_ids, byte_tokenizer

TOKENIZER = byte_tokenizer()
VOCAB_SIZE = TOKENIZER.get_vocab_size(with_added_tokens=True)
GUIDED = guided_tokenizer(TOKENIZER, VOCAB_SIZE, [EOS_ID])
MAX_TOKENS = 400


def new_masks() -> Masks:
    return Masks(GUIDED)


def accepts(masks: Masks, grammar: str, text: str) -> bool:
    """Whether `text` may be a whole output: each of its tokens where it stands, and the end behind it."""
    ids = (*byte_ids(TOKENIZER, text), EOS_ID)
    return all(masks.allowed(grammar, ids[:at])[token_id] for at, token_id in enumerate(ids))


def random_output(masks: Masks, grammar: str, rng: random.Random) -> str | None:
    """A random walk through the grammar that ends where it may; None when it did not end in MAX_TOKENS."""
    output: tuple[int, ...] = ()
    while len(output) < MAX_TOKENS:
        allowed = masks.allowed(grammar, output)
        if allowed[EOS_ID] and (rng.random() < 0.7 or allowed.sum() == 1):
            return str(TOKENIZER.decode(list(output)))
        fitting = [int(token_id) for token_id in np.flatnonzero(allowed) if token_id != EOS_ID]
        closing = [token_id for token_id in fitting if token_id in _CLOSING]
        output += (rng.choice(closing if closing and rng.random() < 0.5 else fitting),)
    return None


_CLOSING = {token_id for piece in '"}],0' for token_id in byte_ids(TOKENIZER, piece)}
