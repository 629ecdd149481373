"""A GGUF vocabulary gives the ids of the model's own tokenizer.json, of SentencePiece and of llama.cpp."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from common.checkpoint import CheckpointError
from common.checkpoint.gguf_metadata import read_gguf_header
from common.checkpoint.gguf_tokenizer import build_tokenizer, read_vocabulary
from tests.common.checkpoint.gguf_vocabularies import IDS_FILE, VOCABULARIES, digest_of
from tests.texts import CORPUS, NORMAL_FORMS
from tests.tiny_vocabularies import (
    BOS,
    EOS,
    PAD,
    SPACE,
    TOOL,
    UNKNOWN,
    byte_level_fields,
    byte_level_merges,
    byte_level_tokens,
    sentencepiece_fields,
    sentencepiece_model,
    write_vocabulary,
)

# llama.cpp composes no characters, and knows no capital letter but A to Z: there tokenizer.json is what counts.
UNLIKE_LLAMA_CPP = ("pre:qwen2", "pre:qwen35", "pre:tekken", "pre:gpt-4o", "pre:llama4", "pre:kanana2")
LLAMA_CPP = json.loads(IDS_FILE.read_text())


def read(path: Path, fields: dict[str, Any]) -> Tokenizer:
    return build_tokenizer(read_gguf_header(write_vocabulary(path / "vocabulary.gguf", fields)).metadata)


@pytest.mark.parametrize("name", VOCABULARIES)
def test_text_becomes_the_ids_that_llama_cpp_gives(tmp_path: Path, name: str) -> None:
    """The file holds a digest of the ids per text: tests/tools/llama_cpp_ids.py."""
    tokenizer = read(tmp_path, VOCABULARIES[name]())
    wrong = [
        text
        for text, digest in zip(CORPUS, LLAMA_CPP[name], strict=True)
        if digest_of(tokenizer.encode(text).ids) != digest
    ]
    assert wrong == ([NORMAL_FORMS[1]] if name in UNLIKE_LLAMA_CPP else [])


# The pre-tokenizers of the models' own tokenizer.json files, as those write them.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?"
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[一-龥\u3040-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
DIGITS = pre_tokenizers.Digits(individual_digits=True)


def _split(*patterns: str) -> pre_tokenizers.PreTokenizer:
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*splits, BYTES])


OWN: dict[str, tuple[pre_tokenizers.PreTokenizer, bool, bool]] = {  # the cut, whether NFC, whether whole pieces first
    "llama-bpe": (_split(LLAMA3), False, True),
    "qwen2": (_split(QWEN2), True, False),
    "smollm": (pre_tokenizers.Sequence([DIGITS, GPT2]), False, False),
    "starcoder": (pre_tokenizers.Sequence([DIGITS, GPT2]), False, False),
    "gpt-2": (GPT2, False, False),
    "tekken": (_split(TEKKEN), False, True),
    "gpt-4o": (_split(GPT4O), False, False),
    "deepseek-v3": (_split(*DEEPSEEK_V3), False, False),
}


def _own_tokenizer(pre: str) -> Tokenizer:
    cut, has_nfc, whole_first = OWN[pre]
    vocab = {token: idx for idx, token in enumerate(byte_level_tokens())}
    tokenizer = Tokenizer(models.BPE(vocab, byte_level_merges(), ignore_merges=whole_first))
    tokenizer.pre_tokenizer, tokenizer.decoder = cut, decoders.ByteLevel()
    if has_nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (BOS, EOS, PAD)])
    tokenizer.add_tokens([AddedToken(TOOL, normalized=False)])
    return tokenizer


@pytest.mark.parametrize("pre", OWN)
def test_text_becomes_the_ids_of_the_models_tokenizer_json(tmp_path: Path, pre: str) -> None:
    ours, own = read(tmp_path, byte_level_fields(pre)), _own_tokenizer(pre)
    for text in CORPUS:
        ids = own.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False).ids == ids, repr(text)
        assert ours.decode(ids, skip_special_tokens=False) == own.decode(ids, skip_special_tokens=False)


def _llama2_tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """A tokenizer.json as Llama 2's and Mistral's are."""
    tools = pytest.importorskip("transformers.tokenization_utils_base")
    names = ("tokens", "scores", "token_type")
    tokens, scores, types = (fields[f"tokenizer.ggml.{name}"] for name in names)
    vocab = {token: idx for idx, token in enumerate(tokens)}
    plain = {token: score for token, score, kind in zip(tokens, scores, types, strict=True) if kind == 1}
    merges = tools.generate_merges({token: vocab[token] for token in plain}, plain)
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token=UNKNOWN, fuse_unk=True, byte_fallback=True))
    prefix = [normalizers.Prepend(SPACE)] if fields["tokenizer.ggml.add_space_prefix"] else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in (UNKNOWN, BOS, EOS, PAD)]
    )
    tokenizer.add_tokens([AddedToken(TOOL, normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 1)])
    return tokenizer


@pytest.mark.parametrize("space_prefix", [True, False])
def test_sentencepiece_text_becomes_the_ids_of_the_models_tokenizer_json(tmp_path: Path, space_prefix: bool) -> None:
    fields = sentencepiece_fields(space_prefix=space_prefix)
    ours, own = read(tmp_path, fields), _llama2_tokenizer(fields)
    for text in CORPUS:
        assert ours.encode(text).ids == own.encode(text).ids, repr(text)


@pytest.mark.parametrize("space_prefix", [True, False])
def test_text_becomes_the_ids_that_sentencepiece_gives_and_back(tmp_path: Path, space_prefix: bool) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    fields = sentencepiece_fields(space_prefix=space_prefix)
    ours, theirs = read(tmp_path, fields), sentencepiece.SentencePieceProcessor()
    theirs.LoadFromSerializedProto(sentencepiece_model(fields))
    for text in CORPUS:
        if "<" in text or "\0" in text:
            continue  # SentencePiece reads no special tokens, and no NUL
        ids = theirs.Encode(text)
        assert ours.encode(text, add_special_tokens=False).ids == ids, repr(text)
        assert ours.decode(ids) == theirs.Decode(ids), repr(text)


def test_special_tokens_have_llama_cpps_defaults() -> None:
    assert read_vocabulary(sentencepiece_fields()).special_ids == {"bos": 1, "eos": 2, "unknown": 0}
    assert read_vocabulary(byte_level_fields("gpt-2", bos_token_id=None)).special_ids == {"eos": 1}


def test_an_answer_ends_with_any_of_the_tokens_that_end_answers() -> None:
    tokens = ["a", "</s>", "<|im_end|>", "<|eot_id|>", "b", "c"]
    types = [1, 4, 1, 3, 3, 3]
    fields = byte_level_fields("gpt-2", tokens=tokens, token_type=types, merges=[], eos_token_id=5, eot_token_id=4)
    assert read_vocabulary(fields).eos_token_ids() == (5, 4, 2, 3)
    closing = byte_level_fields("gpt-2", tokens=tokens, token_type=[1, 3, 1, 1, 1, 1], merges=[], eos_token_id=5)
    assert 1 in read_vocabulary(closing).eos_token_ids()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "t5"}, "tokenizer.ggml.model 't5' is not supported"),
        ({"model": None}, "tokenizer.ggml.model None is not supported"),
        ({"pre": "whale-bpe"}, "tokenizer.ggml.pre 'whale-bpe' is not one of default, gpt-2, "),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing or damaged"),
        ({"tokens": [1, 2]}, "tokenizer.ggml.tokens is missing or damaged"),
        ({"merges": None}, "tokenizer.ggml.merges is missing or damaged"),
        ({"merges": ["a zzz"]}, "the vocabulary is damaged: "),
        ({"token_type": [1]}, r"tokenizer.ggml.token_type has 1 entries for \d+ tokens"),
        ({"scores": ["a"]}, "tokenizer.ggml.scores is missing or damaged"),
        ({"tokens": ["a", "a", "b"]}, "tokenizer.ggml.tokens holds 'a' more than once"),
        ({"eos_token_id": 9999}, "tokenizer.ggml.eos_token_id 9999 is not in a vocabulary of"),
        ({"bos_token_id": None, "add_bos_token": True}, "add_bos_token is true, but .*bos_token_id is missing"),
    ],
)
def test_a_vocabulary_that_is_not_known_or_damaged_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        build_tokenizer(byte_level_fields("gpt-2") | {f"tokenizer.ggml.{n}": value for n, value in changes.items()})
