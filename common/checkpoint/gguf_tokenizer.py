"""Builds a tokenizer from GGUF metadata: byte-level BPE (ggml calls it "gpt2") or SentencePiece BPE ("llama").

What a file leaves out is taken as llama.cpp takes it (src/llama-vocab.cpp).
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from common.checkpoint.gguf_pre_tokenizers import PRE_TOKENIZERS
from common.checkpoint.spec import CheckpointError

Metadata = Mapping[str, Any]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # ggml token types
SPACE = "\u2581"  # what SentencePiece writes for one
SENTENCEPIECE_IDS = {"bos": 1, "eos": 2, "unknown": 0}
# Special tokens by the name of their id in GGUF, and by the name that a chat template uses.
TEMPLATE_NAMES = {
    **{"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"},
    **{"seperator": "sep_token", "cls": "cls_token", "mask": "mask_token"},
}
ENDING_IDS = ("eot", "eom", "fim_pad", "fim_rep", "fim_sep")

# Tokens that end an answer whatever eos_token_id says: llama.cpp's list (special_eog_ids), without the names of
# padding and of repositories that other models than Qwen have as plain markers.
END_OF_GENERATION = frozenset(
    {"<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|end_of_text|>", "<end_of_turn>", "<EOT>"}
    | {"_<EOT>", "[EOT]", "[EOS]", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_utterance>", "<turn|>"}
    | {"<eos>", "<｜end▁of▁sentence｜>", "[e~[", "<|fim_pad|>"}
    | {"<|repo_name|>", "<|file_sep|>"}
)
# The same, but where it is defined as text: a tag of HTML.
CLOSING = "</s>"


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """The vocabulary of a file with llama.cpp's defaults filled in. `special_ids` by the name of their id in GGUF."""

    kind: str  # "gpt2" or "llama"
    pre: str
    tokens: Sequence[str]
    types: Sequence[int]
    scores: Sequence[float]
    merges: Sequence[str]
    special_ids: Mapping[str, int]
    adds_bos: bool
    adds_eos: bool
    adds_space_prefix: bool

    def token(self, name: str) -> str | None:
        """The text of a special token."""
        return self.tokens[self.special_ids[name]] if name in self.special_ids else None

    def is_special(self, token_id: int) -> bool:
        """Whether the token never stands for text, by its type or because it ends answers."""
        return self.types[token_id] in (CONTROL, UNKNOWN) or self._ends_answers(token_id)

    def eos_token_ids(self) -> tuple[int, ...]:
        """Every token that ends an answer, the file's own first."""
        own = [self.special_ids[name] for name in ("eos", *ENDING_IDS) if name in self.special_ids]
        named = [token_id for token_id in range(len(self.tokens)) if self._ends_answers(token_id)]
        return tuple(dict.fromkeys([*own, *named]))

    def _ends_answers(self, token_id: int) -> bool:
        token = self.tokens[token_id]
        return token in END_OF_GENERATION or (token == CLOSING and self.types[token_id] != USER_DEFINED)


def read_vocabulary(metadata: Metadata) -> GgufVocabulary:
    """Raises CheckpointError that names the field which is missing, damaged or of an unknown kind."""
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if kind not in ("gpt2", "llama"):
        raise CheckpointError(
            f"tokenizer.ggml.model {kind!r} is not supported, only 'gpt2' (byte-level BPE) and 'llama' (SentencePiece)"
        )
    if kind == "gpt2" and pre not in PRE_TOKENIZERS:
        raise CheckpointError(f"tokenizer.ggml.pre {pre!r} is not one of {', '.join(PRE_TOKENIZERS)}")
    tokens = [token or f"[EMPTY_{idx}]" for idx, token in enumerate(_array(metadata, "tokens", str))]
    special_ids = _special_ids(metadata, kind, len(tokens))
    adds_bos = kind == "llama" or PRE_TOKENIZERS[pre].adds_bos
    return GgufVocabulary(
        kind=kind,
        pre=pre,
        tokens=tokens,
        types=_array(metadata, "token_type", int, len(tokens), NORMAL),
        scores=_array(metadata, "scores", int | float, len(tokens), 0.0),
        merges=_array(metadata, "merges", str) if kind == "gpt2" else (),
        special_ids=special_ids,
        adds_bos=_adds(metadata, "bos", adds_bos, special_ids),
        adds_eos=_adds(metadata, "eos", False, special_ids),
        adds_space_prefix=metadata.get("tokenizer.ggml.add_space_prefix", kind == "llama"),
    )


def build_tokenizer(metadata: Metadata) -> Tokenizer:
    """Raises CheckpointError when the vocabulary is damaged or of a kind that is not known."""
    vocabulary = read_vocabulary(metadata)
    try:
        tokenizer = _byte_level(vocabulary) if vocabulary.kind == "gpt2" else _sentencepiece(vocabulary)
    except CheckpointError:
        raise
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"the vocabulary is damaged: {error}") from error
    _add_special_tokens(tokenizer, vocabulary)
    _add_around(tokenizer, vocabulary)
    return tokenizer


def tokenizer_digest(metadata: Metadata) -> str:
    """Hex sha256 over everything that decides how text becomes token ids."""
    fields = {name: value for name, value in metadata.items() if name.startswith("tokenizer.ggml.")}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _byte_level(vocabulary: GgufVocabulary) -> Tokenizer:
    pre = PRE_TOKENIZERS[vocabulary.pre]
    merges = [_merge(merge) for merge in vocabulary.merges]
    tokenizer = Tokenizer(models.BPE(_ids(vocabulary), merges, ignore_merges=pre.ignores_merges))
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in pre.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    if pre.has_nfc:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _sentencepiece(vocabulary: GgufVocabulary) -> Tokenizer:
    """SentencePiece joins the pair that makes the token of the best score, and the leftmost of equals."""
    model = models.BPE(
        _ids(vocabulary),
        merges_of_scores(vocabulary),
        unk_token=vocabulary.token("unknown"),
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    prefix = [normalizers.Prepend(SPACE)] if vocabulary.adds_space_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if vocabulary.adds_space_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def merges_of_scores(vocabulary: GgufVocabulary) -> list[tuple[str, str]]:
    """Each pair of tokens that makes a token: the best score first, then the longest left part, as in transformers."""
    scores = {
        token: score
        for token, kind, score in zip(vocabulary.tokens, vocabulary.types, vocabulary.scores, strict=True)
        if kind == NORMAL
    }
    best_first = sorted(scores, key=scores.__getitem__, reverse=True)
    return [
        (token[:idx], token[idx:])
        for token in best_first
        for idx in range(len(token) - 1, 0, -1)
        if token[:idx] in scores and token[idx:] in scores
    ]


def _ids(vocabulary: GgufVocabulary) -> dict[str, int]:
    ids = {token: token_id for token_id, token in enumerate(vocabulary.tokens)}
    if len(ids) != len(vocabulary.tokens):
        twice = next(token for token, count in Counter(vocabulary.tokens).items() if count > 1)
        raise CheckpointError(f"tokenizer.ggml.tokens holds {twice!r} more than once")
    return ids


def _merge(merge: str) -> tuple[str, str]:
    cut = merge.find(" ", 1)
    return merge[:cut], merge[cut + 1 :]


def _add_special_tokens(tokenizer: Tokenizer, vocabulary: GgufVocabulary) -> None:
    ids = range(len(vocabulary.tokens))
    special = [idx for idx in ids if vocabulary.is_special(idx)]
    defined = [idx for idx in ids if vocabulary.types[idx] == USER_DEFINED and not vocabulary.is_special(idx)]
    tokenizer.add_special_tokens([AddedToken(vocabulary.tokens[i], special=True, normalized=False) for i in special])
    tokenizer.add_tokens([AddedToken(vocabulary.tokens[i], normalized=False) for i in defined])


def _add_around(tokenizer: Tokenizer, vocabulary: GgufVocabulary) -> None:
    """Raw text stands between BOS and EOS, where the file has it so."""
    first = [vocabulary.tokens[vocabulary.special_ids["bos"]]] if vocabulary.adds_bos else []
    last = [vocabulary.tokens[vocabulary.special_ids["eos"]]] if vocabulary.adds_eos else []
    if first or last:
        ids = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(first + last)]
        tokenizer.post_processor = processors.TemplateProcessing(single=[*first, "$A", *last], special_tokens=ids)


def _array(metadata: Metadata, name: str, kind: Any, length: int | None = None, absent: Any = None) -> list[Any]:
    """A list of `kind`. Without `length` the field must be there; with it, an absent one is `absent` everywhere."""
    values = metadata.get(f"tokenizer.ggml.{name}")
    if values is None and length is not None:
        return [absent] * length
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise CheckpointError(f"tokenizer.ggml.{name} is missing or damaged")
    if length is not None and len(values) < length:
        raise CheckpointError(f"tokenizer.ggml.{name} has {len(values)} entries for {length} tokens")
    return values if length is None else values[:length]


def _special_ids(metadata: Metadata, kind: str, num_tokens: int) -> dict[str, int]:
    ids = dict(SENTENCEPIECE_IDS) if kind == "llama" else {}
    for name in (*TEMPLATE_NAMES, *ENDING_IDS):
        found = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if found is None:
            continue
        if not isinstance(found, int) or found >= num_tokens:
            raise CheckpointError(f"tokenizer.ggml.{name}_token_id {found} is not in a vocabulary of {num_tokens}")
        ids[name] = found
    return {name: idx for name, idx in ids.items() if idx < num_tokens}


def _adds(metadata: Metadata, name: str, absent: bool, special_ids: Mapping[str, int]) -> bool:
    key = f"tokenizer.ggml.add_{name}_token"
    if name in special_ids:
        return bool(metadata.get(key, absent))
    if metadata.get(key):
        raise CheckpointError(f"{key} is true, but tokenizer.ggml.{name}_token_id is missing")
    return False
