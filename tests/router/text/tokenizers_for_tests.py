"""Tokenizers whose tokens are single bytes and a few merged pieces, so that text cases are exact."""

from collections.abc import Iterable

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from common.values.request import FinishReason, SampledToken, TokenEvent

SPECIAL_TOKENS = ("<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>", "<image>")
BOS_ID, EOS_ID, PAD_ID, IM_START_ID, IM_END_ID, IMAGE_ID = range(6)
# Pieces that one token spells, in bytes.
PIECES = ("ab", "END", "\n\nUser:", "END\n\nUser:")
CHATML = (
    "{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """Byte-level; encodes every byte as one token, and adds BOS as a post-processor would."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: idx for idx, piece in enumerate([*SPECIAL_TOKENS, *alphabet, *map(_spelled, PIECES)])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS_ID)])
    return tokenizer


def byte_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """One token per byte of `text`."""
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def piece_id(tokenizer: Tokenizer, piece: str) -> int:
    """The token that spells `piece` alone."""
    token_id = tokenizer.token_to_id(_spelled(piece))
    assert token_id is not None
    return int(token_id)


def token_events(
    token_ids: Iterable[int], finish_reason: FinishReason | None = None, choice_idx: int = 0
) -> list[TokenEvent]:
    """A choice's tokens in order; the last carries `finish_reason`."""
    ids = list(token_ids)
    return [
        TokenEvent(choice_idx, position, SampledToken(token_id), finish_reason if position == len(ids) - 1 else None)
        for position, token_id in enumerate(ids)
    ]


def _spelled(piece: str) -> str:
    pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(part for part, _ in pre_tokenizer.pre_tokenize_str(piece))
