"""Word by word must give what the whole text gives, for every tokenizer that is taken apart."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from common.checkpoint import open_checkpoint
from common.checkpoint.gguf_pre_tokenizers import PRE_TOKENIZERS
from router.text.word_encoder import WordEncoder, _joined, is_separable

# Merges across everything that could be cut wrongly: spaces, line ends, letters, digits, signs.
_MERGES = ["Ġ Ġ", "ĠĠ ĠĠ", "Ġ a", "a b", "Ġa b", "b Ġ", "Ċ Ċ", "Ġ Ċ", "Ċ Ġ", ". Ċ", "1 1", "Ġ 1", "! !", "' s", "Ġ !"]
_PIECES = ["a", "b", "ab", "é", "e\u0301", "ж", "汉字", "1", "11", "!", "!!", ".", "'s", "'S", "<s>", "<|x|>", "_"]
_SPACES = [" ", " ", " ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u3000", "\u2028", "\x1c", "\x85", "\u200b", "\u180e"]
TEXTS = st.lists(st.sampled_from(_PIECES + _SPACES), max_size=24).map("".join)


def _tokenizer(*steps: pre_tokenizers.PreTokenizer) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(left, right) for left, right in (merge.split(" ") for merge in _MERGES)]
    vocab = {piece: idx for idx, piece in enumerate(dict.fromkeys([*alphabet, *(a + b for a, b in merges)]))}
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(steps))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    tokenizer.add_tokens([AddedToken("<|x|>", normalized=False)])
    return tokenizer


def _split(name: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(PRE_TOKENIZERS[name].patterns[0]), behavior="isolated")


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
SEPARABLE = {
    "gpt2": _tokenizer(GPT2),
    "smollm": _tokenizer(pre_tokenizers.Digits(individual_digits=True), GPT2),
    "llama": _tokenizer(_split("llama-bpe"), BYTES),
    "qwen": _tokenizer(_split("qwen2"), BYTES),
}
SEPARABLE["qwen"].normalizer = normalizers.NFC()


def _whole(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("name", SEPARABLE)
@given(texts=st.lists(TEXTS, min_size=1, max_size=4))
@settings(max_examples=300, deadline=None)
def test_words_in_a_row_are_the_whole_text(name: str, texts: list[str]) -> None:
    """Each text twice, so that the cache answers too; a tiny cache starts over again and again."""
    tokenizer = SEPARABLE[name]
    assert is_separable(tokenizer)
    for encoder in (WordEncoder(tokenizer), WordEncoder(tokenizer, max_words=3)):
        for text in [*texts, *texts]:
            assert encoder.encode(text) == _whole(tokenizer, text), repr(text)


@pytest.mark.parametrize("name", SEPARABLE)
@given(text=st.text(max_size=40))
@settings(max_examples=200, deadline=None)
def test_any_text_is_encoded_as_a_whole_one(name: str, text: str) -> None:
    text = text.encode("utf-8", "ignore").decode()
    assert WordEncoder(SEPARABLE[name]).encode(text) == _whole(SEPARABLE[name], text)


def _with_added(token: AddedToken) -> Tokenizer:
    tokenizer = _tokenizer(GPT2)
    tokenizer.add_tokens([token])
    return tokenizer


def _with_normalizer(normalizer: normalizers.Normalizer) -> Tokenizer:
    tokenizer = _tokenizer(GPT2)
    tokenizer.normalizer = normalizer
    return tokenizer


NOT_SEPARABLE = {
    "nothing cuts": _tokenizer(BYTES),
    "a space is put before the text": _tokenizer(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "another expression": _tokenizer(pre_tokenizers.Split(Regex("a b|."), behavior="isolated"), BYTES),
    "bytes before the cut": _tokenizer(BYTES, _split("qwen2")),
    "spaces replaced": _tokenizer(pre_tokenizers.Metaspace()),
    "normalized": _with_normalizer(normalizers.Lowercase()),
    "an added token with a space": _with_added(AddedToken("a b", normalized=False)),
    "an added token that takes spaces in": _with_added(AddedToken("<m>", rstrip=True, normalized=False)),
}


@pytest.mark.parametrize("name", NOT_SEPARABLE)
def test_other_tokenizers_get_whole_texts(name: str) -> None:
    tokenizer = NOT_SEPARABLE[name]
    assert not is_separable(tokenizer)
    for text in ("", "a b", "a b  ab\n b", "<m> a b"):
        assert WordEncoder(tokenizer).encode(text) == _whole(tokenizer, text)


def test_the_cache_is_bounded_and_keeps_no_long_words() -> None:
    encoder = WordEncoder(SEPARABLE["gpt2"], max_words=10)
    for number in range(100):
        encoder.encode(f"w{number} x{number} {'long' * 30} {'汉' * 6}")
        assert 0 < len(encoder._ids) <= 10
        assert all(len(word) <= 64 for word in encoder._ids)
        assert all(len(ids) <= 16 for ids in encoder._ids.values())


class _Word(str):
    def __add__(self, other: str) -> str:
        raise AssertionError("a million spaces would be copied a million times")


def test_a_run_of_spaces_is_copied_once() -> None:
    words = [_Word(word) for word in ("a", " ", " ", " b", " \n", " ")]
    assert _joined(words) == ["a", "   b", " \n "]


@pytest.mark.model
def test_the_demo_models_tokenizer_is_taken_apart(demo_model: Path) -> None:
    tokenizer = open_checkpoint(demo_model).tokenizer()
    assert is_separable(tokenizer)
    text = "It's 2026: the  router\n\n  tokenizes\tonce, doesn't it? <|im_end|> Да, ну и ну!\n"
    assert WordEncoder(tokenizer).encode(text) == _whole(tokenizer, text)
